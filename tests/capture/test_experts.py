"""Which experts of transformers are one operator, by what their own code computes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation

from tapas.capture.experts import gating_of_module


@pytest.fixture(autouse=True)
def on_meta():
    with torch.device("meta"):
        yield


class Plain(nn.Module):
    def __init__(self, config: Any, **numbers: float) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.empty(4, 6, 8)), nn.Parameter(torch.empty(4, 8, 3))
        self.act_fn = nn.SiLU()
        vars(self).update(numbers)

    def forward(self, *_: Any) -> Tensor: ...


def words(kind: type[nn.Module], flags: dict[str, bool], **given: Any) -> str | None:
    found = gating_of_module(use_experts_implementation(type(kind.__name__, (kind,), {}), **flags)(None, **given))
    return found and str(found)


class Limited(Plain):
    """As MiniMax-M3 has it, with limits that small numbers do not reach."""

    def _apply_gate(self, packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return (up + 1.0) * (gate * torch.sigmoid(gate * self.alpha))


class InTurn(Plain):
    def _apply_gate(self, packed: Tensor) -> Tensor:
        return torch.relu(packed[..., ::2]) * packed[..., 1::2]


class InSingle(Plain):
    """In float32 whatever it is given: the operator computes in the precision of its weights."""

    def _apply_gate(self, packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, dim=-1)
        return (self.act_fn(gate.float()) * up.float()).to(packed.dtype)


class Sharp(Plain):
    def _apply_gate(self, packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, dim=-1)
        return self.act_fn(gate) * up.sign()


class Normed(Plain):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.post_expert_norm = nn.RMSNorm(8)


class Alone(Plain):
    def __init__(self, config: Any, activation: nn.Module) -> None:
        super().__init__(config)
        self.up_proj, self.act_fn = nn.Parameter(torch.empty(4, 3, 8)), activation


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) / 2


@pytest.mark.parametrize(("kind", "flags", "given", "said"), [
    (Plain, {}, {}, "silu"),
    (Limited, {}, {"limit": 70.0, "alpha": 1.702}, "silu limit=70.0 alpha=1.702 shift=1.0"),
    (Limited, {}, {"limit": 7.0, "alpha": 1.0}, "silu limit=7.0 shift=1.0"),
    (InTurn, {}, {}, "relu pairs"),
    (InSingle, {}, {}, None),
    (Sharp, {}, {}, None),
    (Normed, {"has_post_expert_norm": True}, {}, None),
    (Alone, {"has_gate": False}, {"activation": nn.GELU("tanh")}, "gelu_tanh alone"),
    (Alone, {"has_gate": False}, {"activation": Halved()}, None),
    (Plain, {"has_bias": True}, {}, None),  # it has none
    (Plain, {"is_transposed": True}, {}, None),  # its weights are not
])  # fmt: skip
def test_what_lies_between_the_products(
    kind: type[nn.Module], flags: dict[str, bool], given: dict[str, Any], said: str | None
) -> None:
    assert words(kind, flags, **given) == said


class Settings:
    """Of a small model: answers whatever a constructor of experts asks for."""

    _experts_implementation = moe_latent_size = None
    hidden_act = hidden_activation = "silu"
    mlp_hidden_act, swiglu_limit, swiglu_alpha, rms_norm_eps, post_norm_eps = "relu2", 7.0, 1.702, 1e-6, 1e-6

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return "silu" if name.endswith("_act") else 4


@pytest.mark.full
def test_experts_of_transformers() -> None:
    """All that go through its interface; two do what the operator does not."""
    import importlib
    import inspect
    from pathlib import Path

    from transformers import models

    found: dict[str, Any] = {}
    for path in sorted(Path(models.__file__).parent.glob("*/modeling_*.py")):
        if "@use_experts_implementation" in path.read_text():
            module = importlib.import_module(f"{models.__name__}.{path.parent.name}.{path.stem}")
            for name, kind in inspect.getmembers(module, inspect.isclass):
                if kind.__module__ == module.__name__ and hasattr(kind, "_apply_gate"):
                    found[name] = gating_of_module(kind(Settings()))
    assert len(found) > 50
    assert {name for name, gating in found.items() if gating is None} <= {"BeamExperts", "MuseSparkExperts"}
    assert str(found["GptOssExperts"]) == "silu pairs limit=7.0 alpha=1.702 shift=1.0 transposed"
    assert str(found["NemotronHExperts"]) == "relu2 alone"
