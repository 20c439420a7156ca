"""The model to check: real weights, no dropout, and not larger than this machine can take.

Dropout is set to zero for a comparison: original and parallel program draw their numbers in another order. The plan
is made, or followed, for the model as it is; only what runs here is silenced.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from tapas.capture.program import Captured, capture_program
from tapas.errors import TapasError
from tapas.ir.fold import Folded, fold
from tapas.ir.graph import Graph, Op
from tapas.ir.inline import unfold
from tapas.ir.interpreter import leaf_values, resolve

LIMIT = 8_000_000_000  # bytes, over all ranks
COPIES = 4  # of every weight in float64: itself, its gradient, two moments


@dataclass(frozen=True)
class Subject:
    model: nn.Module
    inputs: dict[str, Any]  # by argument name
    captured: Captured

    @cached_property
    def folded(self) -> Folded:
        return fold(self.graph)

    @property
    def graph(self) -> Graph:
        return self.captured.graph

    def leaves(self) -> dict[str, torch.Tensor]:
        return leaf_values(self.graph, self.model, self.inputs) | self.captured.constants


def capture_subject(model: nn.Module, inputs: Any, training: bool | None = None, name: str = "") -> Subject:
    _check_real(model, inputs)
    captured = capture_program(model, inputs, training=training, name=name)
    captured = replace(captured, graph=unfold(captured.graph))  # operator by operator, so that one can be blamed
    return Subject(model, _named(model, inputs), captured)


def check_size(place: str, parameters: int, ranks: int, share: float = 0.0, remedy: str = "") -> None:
    """`share`: bytes that a rank needs, once a plan says so."""
    nbytes = COPIES * 8 * parameters + ranks * max(share, COPIES * 8 * parameters / ranks)
    if nbytes > LIMIT:
        raise TapasError(
            place,
            f"original and {ranks} ranks in float64 take about {nbytes / 1e9:.0f} GB here, the limit is"
            f" {LIMIT / 1e9:.0f} GB ({parameters / 1e6:,.0f} M parameters)",
            remedy
            or "check a smaller version of it: --set num_hidden_layers=2 --set hidden_size=256 --batch 4 --seq 32",
        )


def _check_real(model: nn.Module, inputs: Any) -> None:
    held = [*model.named_parameters(), *model.named_buffers()]
    given = list((inputs if isinstance(inputs, Mapping) else dict(enumerate(inputs))).items())
    for name, tensor in (*held, *given):
        if isinstance(tensor, torch.Tensor) and (tensor.is_meta or tensor.device.type != "cpu"):
            raise TapasError(str(name), f"is on the {tensor.device.type} device", "give real tensors on the CPU")


def _named(model: nn.Module, inputs: Any) -> dict[str, Any]:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    return dict(inspect.signature(model.forward).bind(*given).arguments)


def disturb(model: nn.Module, seed: int = 1) -> None:
    """A bias of zeros or a norm's weight of ones would hide mistakes: give them some noise."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.is_floating_point()
                and parameter.numel()
                and bool((parameter == parameter.flatten()[0]).all())
            ):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((0.1 * noise).to(parameter.dtype))


_CHANCES = ("p", "dropout_p", "dropout")  # what torch's schemas call the share that is dropped


def silent_graph(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """The graph without dropout, and the modules where there was some."""
    ops = tuple(_silent(op) for op in graph.ops)
    changed = dict.fromkeys(old.module or old.name for old, new in zip(graph.ops, ops, strict=True) if old != new)
    return replace(graph, ops=ops), tuple(changed)


def silent_folded(folded: Folded) -> Folded:
    blocks = tuple(replace(block, ops=tuple(map(_silent, block.ops))) for block in folded.blocks)
    return replace(folded, blocks=blocks)


def _silent(op: Op) -> Op:
    function: Any = resolve(op.target)
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return op
    names = [argument.name for argument in function._schema.arguments]
    position = next((names.index(name) for name in _CHANCES if name in names), None)
    if position is None:
        raise TapasError(
            op.module or op.name, f"{op.target} draws random numbers, which no two programs do alike",
            "check the model without it",
        )  # fmt: skip
    args = tuple(0.0 if i == position else value for i, value in enumerate(op.args))
    kwargs = tuple((key, 0.0 if key == names[position] else value) for key, value in op.kwargs)
    return op if (args, kwargs) == (op.args, op.kwargs) else replace(op, args=args, kwargs=kwargs)


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def silence(model: nn.Module) -> None:
    """The same for a module: dropout modules, and what modules and configurations call drop-something."""
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        _zero(vars(module))
    config = getattr(model, "config", None)
    for part in (config, *(vars(config).values() if hasattr(config, "__dict__") else ())):
        if part is not None and type(part).__name__.endswith("Config"):
            _zero(vars(part))
            if getattr(part, "use_cache", False):  # not captured either
                part.use_cache = False


def _zero(fields: dict[str, Any]) -> None:
    fields.update({k: 0.0 for k, v in fields.items() if "drop" in k and isinstance(v, float)})
