"""What people do with a module of torch, they do with a parallel one; or are told why not."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn
from torch.distributed.tensor import DTensor

import tapas
from tapas.errors import TapasError
from tests.distributed.parallel import mesh_of
from tests.distributed.pool import Pool
from tests.distributed.small import EAGER

D, MESH = 8, (2, 2)


class Net(nn.Module):
    """With names that a parallel module might want for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.program = nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D, bias=False))
        self.register_buffer("count", torch.ones(D))
        self.alpha = 1.0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (self.program(x) * self.count * self.alpha * scale).square().mean()


def made(kind: type[nn.Module] = Net, seed: int = 0, **options: Any) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """The original, the parallel module and inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, x = kind().double(), torch.randn(4, D).double()
    return model, tapas.parallelize(model, (x,), mesh=mesh_of(MESH), cluster=EAGER, **options), x


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()


def off(module: nn.Module, model: nn.Module) -> float:
    """How far weights and buffers are apart."""
    mine = module.state_dict()
    return max(float((whole(mine[name]) - whole(value)).abs().max()) for name, value in model.state_dict().items())


def error_of(work: Any, *args: Any, **kwargs: Any) -> str:
    try:
        work(*args, **kwargs)
    except TapasError as error:
        return str(error)
    return "nothing"


# -- copies, averages, scaled gradients -----------------------------------------------------------------


def averaged(rank: int) -> list[float]:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model, module, x = made()
    found = []
    for one in (model, module):
        ema = AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(x).backward()
            optimizer.step()
            ema.update_parameters(one)
        twin = copy.deepcopy(one)
        optimizer.step()  # not of the copy
        loss = twin(x)
        loss.backward()
        found.append([ema(x).item(), loss.item(), *(float(whole(p.grad).norm()) for p in twin.parameters())])
    return [abs(a - b) for a, b in zip(*found, strict=True)]


def test_copies_and_averages(pool: Pool) -> None:
    for errors in pool(averaged):
        assert max(errors) < 1e-12


def scaled(rank: int) -> tuple[float, float, bool]:
    model, module, x = made()
    for one in (model, module):
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(one.parameters(), 0.1)
        for factor in (1.0, float("inf"), 1.0):  # the second step is left out
            optimizer.zero_grad()
            (scaler.scale(one(x)) * factor).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        one.zero_grad(set_to_none=False)
    empty = all(not whole(p.grad).any() for p in module.parameters())
    return off(module, model), scaler.get_scale(), empty


def test_scaled_gradients(pool: Pool) -> None:
    for error, scale, empty in pool(scaled):
        assert error < 1e-12 and scale == 4.0 and empty


def loaded(rank: int) -> tuple[float, str, str]:
    """Plain tensors, those of another parallel module, and wrong ones."""
    _, module, x = made()
    other, twin, _ = made(seed=1)
    module.load_state_dict(other.state_dict())
    error = off(module, other) + abs(float(module(x)) - float(other(x)))
    _, module, _ = made()
    module.load_state_dict(twin.state_dict())
    wrong = {**other.state_dict(), "program.0.weight": torch.zeros(3, 3)}
    said = []
    for state, options in ((wrong, {}), (other.state_dict(), {"assign": True})):
        with pytest.raises(RuntimeError) as caught:
            module.load_state_dict(state, **options)
        said.append(str(caught.value))
    return error + off(module, other), *said


def test_plain_tensors_are_loaded(pool: Pool) -> None:
    for error, shape, assigned in pool(loaded):
        assert error < 1e-12
        assert "size mismatch for program.0.weight" in shape
        assert "program.0.weight: is set on the parallel module" in assigned


# -- the tree ---------------------------------------------------------------------------------------------


def looked_at(rank: int) -> tuple[str, list[str], list[str]]:
    _, module, x = made()
    net: Any = module.get_submodule("program")
    names = [type(child).__name__ for child in net]
    assert isinstance(module.get_submodule("program"), nn.Sequential) and len(net) == 3 and len(net[:2]) == 2
    assert net[0].weight is module.get_parameter("program.0.weight") and net[2].bias is None
    said = [
        error_of(setattr, module, "alpha", 2.0),
        error_of(setattr, net[0], "in_features", 3),
        error_of(setattr, net[0], "weight", nn.Parameter(torch.zeros(2 * D, D))),
        error_of(setattr, module, "count", torch.ones(3)),
        error_of(module.register_buffer, "more", torch.ones(3)),
        error_of(net.append, nn.Linear(D, D)),
        error_of(net[0].register_forward_hook, print),
        error_of(net[0], x),
        error_of(module, x, scale=2.0),
        error_of(module, x, 1),
        error_of(module, x, scale=1.0),
    ]
    before = float(module(x))
    module.count = torch.full((D,), 2.0, dtype=torch.float64)  # a buffer is read in every step
    assert float(module(x)) == pytest.approx(4 * before)
    heard = []
    module.register_forward_hook(lambda *_: heard.append(1))
    module(x)
    assert heard == [1]
    return repr(module), names, said


def test_the_tree_of_the_original(pool: Pool) -> None:
    for text, names, said in pool(looked_at):
        assert names == ["Linear", "ReLU", "Linear"]
        assert text.startswith("ParallelNet(") and "(program): Sequential(" in text
        assert re.search(r"\(0\): Linear\(in_features=8, out_features=16, bias=True, weight: \[[SR]", text)
        wanted = [
            "alpha: is set on", "program.0.in_features: is set on", "program.0.weight: is set on",
            "count: is set to torch.float32[3], the program was made for torch.float64[8]",
            "more: is set on", "program.3: is registered", "program.0: hooks on", "program.0: submodules of",
            "scale: is 2.0, the plan was made with 1.0", "scale: is 1, the plan was made with 1.0", "nothing",
        ]  # fmt: skip
        assert [text[: len(start)] for text, start in zip(said, wanted, strict=True)] == wanted


class HalfFrozen(nn.Module):
    """Never trains its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)

    def train(self, mode: bool = True) -> "HalfFrozen":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x)).pow(3).mean()


def in_modes(rank: int) -> list[float]:
    model, module, x = made(HalfFrozen)
    losses = []
    for one in (model, module):
        losses.append([])
        for change in (lambda m: m, lambda m: m.eval(), lambda m: m.train(), lambda m: m.norm.train()):
            change(one)
            losses[-1].append(float(one(x)))
    return [abs(a - b) for a, b in zip(*losses, strict=True)]


def test_modes_of_submodules(pool: Pool) -> None:
    for errors in pool(in_modes):
        assert max(errors) < 1e-12


# -- gradients ----------------------------------------------------------------------------------------------


class Front(nn.Module):
    """Reads its input in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).relu()) - x).square().mean() + x.detach().mean() + x.t().matmul(x).sum()


def gradient_of_input(rank: int, strategy: str) -> tuple[float, str, str]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = Front().double(), torch.randn(4, D).double().requires_grad_()
    pins = [("*", strategy)] if strategy else []
    module = tapas.parallelize(model, (x,), mesh=mesh_of(MESH), cluster=EAGER, pins=pins)
    found = []
    for one in (model, module):
        front = torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        given = x.detach().clone() @ front  # a model in front of this one
        one(given).backward()
        assert front.grad is not None
        found.append(front.grad)
    with torch.no_grad():
        module(x)
    other = tapas.parallelize(model, (x.detach(),), mesh=mesh_of(MESH), cluster=EAGER)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    frozen = tapas.parallelize(model, (x.detach(),), mesh=mesh_of(MESH), cluster=EAGER)
    frozen(x.detach())
    return float((found[0] - found[1]).abs().max()), error_of(other, x), error_of(frozen, x)


@pytest.mark.parametrize("strategy", ["", "ddp", "megatron"])
def test_gradients_of_inputs(pool: Pool, strategy: str) -> None:
    for error, unplanned, frozen in pool(gradient_of_input, strategy):
        assert error < 1e-12
        assert unplanned.startswith("x: requires a gradient") and frozen.startswith("x: requires a gradient")


def unfrozen(rank: int) -> tuple[str, float]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = Net().double(), torch.randn(4, D).double()
    model.program[0].requires_grad_(False)
    module = tapas.parallelize(model, (x,), mesh=mesh_of(MESH), cluster=EAGER)
    module(x).backward()
    module.requires_grad_(True)
    with torch.no_grad():
        loss = float(module(x))
    return error_of(module, x), loss - float(model(x))


def test_unfrozen_weights_are_refused(pool: Pool) -> None:
    for said, error in pool(unfrozen):
        assert said.startswith("program.0.weight: requires a gradient, but was frozen") and abs(error) < 1e-12


# -- buffers that no checkpoint has ---------------------------------------------------------------------------


def llama_config() -> T.LlamaConfig:
    return T.LlamaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=50, use_cache=False)  # fmt: skip


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)
        self.register_buffer("table", torch.arange(D, dtype=torch.float32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.up(x) * self.table).square().mean()


def without_weights(rank: int, folder: str) -> tuple[float, str]:
    ids = torch.arange(32).reshape(4, 8) % 50
    model = T.LlamaForCausalLM.from_pretrained(folder)
    with torch.device("meta"):
        empty, table = T.LlamaForCausalLM(llama_config()), Table()
    inputs = {"input_ids": ids, "labels": ids}
    module = tapas.parallelize(empty, inputs, mesh=mesh_of(MESH), cluster=EAGER, initialize=False)
    tapas.load_safetensors(module, folder)
    error = abs(float(module(**inputs)["loss"]) - float(model(**inputs)["loss"]))
    options = {"mesh": mesh_of(MESH), "cluster": EAGER, "initialize": False}
    return error, error_of(tapas.parallelize, table, (torch.zeros(4, D),), **options)


def test_buffers_that_no_checkpoint_has(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    T.LlamaForCausalLM(llama_config()).save_pretrained(tmp_path)
    for error, said in pool(without_weights, str(tmp_path)):
        assert error < 1e-5
        assert said.startswith("table: is on the meta device") and "not persistent" in said


# -- ranks that disagree -----------------------------------------------------------------------------------------


def disagreeing(rank: int) -> tuple[str, float, str, float, str]:
    torch.manual_seed(rank)
    model = Net()
    batch = torch.randn(4, D)
    options = {"mesh": mesh_of(MESH), "cluster": EAGER}
    weights = error_of(tapas.parallelize, model, (batch,), **options)
    module = tapas.parallelize(model, (batch,), broadcast=True, **options)
    torch.manual_seed(0)
    first = off(module, Net())
    inputs = error_of(module, batch)
    for _ in range(3):
        module(torch.ones(4, D))
    later = error_of(module, batch)  # only the first steps are looked at
    torch.manual_seed(0)
    unchecked = tapas.parallelize(Net(), (batch,), check_inputs=False, **options)
    unchecked(batch)
    torch.manual_seed(0)
    model = Net()
    model.get_buffer("count")[rank] = 2.0
    return weights, first, inputs, float(later != "nothing"), error_of(tapas.parallelize, model, (batch,), **options)


def test_ranks_that_disagree(pool: Pool) -> None:
    for weights, first, inputs, later, buffers in pool(disagreeing):
        assert weights.startswith("program.0.weight: is not the same on all ranks") and "broadcast=True" in weights
        assert first == 0.0 and later == 0.0
        assert inputs.startswith("x: is not the same on all ranks") and "check_inputs=False" in inputs
        assert buffers.startswith("count: is not the same")


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(D, 64), nn.Linear(64, D), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.up(x).relu())).square().mean()


def drawn(rank: int, recompute: str) -> tuple[list[float], list[torch.Tensor], bool, str]:
    """Two steps whose backward passes come last; users' generators are out of step."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(5)
    with torch.random.fork_rng(devices=[]):
        _, module, x = made(Noisy, recompute=recompute)
    torch.manual_seed(100 + rank)
    before = torch.get_rng_state()
    losses = [module(x), module(x)]
    sum(losses).backward()  # type: ignore[union-attr]
    untouched = torch.equal(before, torch.get_rng_state())
    again = error_of(lambda: checkpoint(module, x, use_reentrant=False).backward())
    gradients = [whole(p.grad) for p in module.parameters()]
    return [float(loss) for loss in losses], gradients, untouched, again


def test_random_numbers_are_drawn_in_step(pool: Pool) -> None:
    kept, computed_again = pool(drawn, "none"), pool(drawn, "block")
    for losses, gradients, untouched, again in (*kept, *computed_again):
        assert losses == pytest.approx(kept[0][0], rel=1e-12) and losses[0] != losses[1]
        assert untouched and "draw other random numbers" in again
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(gradients, kept[0][1], strict=True))
