"""Random operators on real ranks: who draws what, from which generator, and how often one is seeded."""

import copy
import warnings
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tapas
from tapas._torch import TorchDispatchMode
from tapas.runtime import draws as drawing
from tapas.runtime.calls import OtherStream, Recomputed
from tapas.runtime.module import executor_of
from tests.distributed.parallel import mesh_of
from tests.distributed.pool import Pool
from tests.distributed.small import EAGER

full = pytest.mark.full
MESH, LAYERS, D = (2, 2), 3, 16
COORDINATES = [(i, j) for i in range(2) for j in range(2)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.dropout(self.up(self.norm(x)).relu(), 0.5, self.training)
        return x + F.dropout(self.down(inner), 0.5, self.training)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(D, 4 * D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def parallel(pin: str, **asked: Any) -> tuple[nn.Module, torch.Tensor]:
    """Megatron splits what is inside of a layer over both axes, and what is between layers over the first."""
    torch.manual_seed(0)
    model, x = Stack().double(), torch.randn(8, D).double()
    return tapas.parallelize(model, (x,), mesh=mesh_of(MESH), cluster=EAGER, pins={"*": pin}, **asked), x


def step(module: nn.Module, called: Any, x: torch.Tensor) -> list[Any]:
    """The loss and the gradients."""
    module.zero_grad()
    loss = called(x)
    loss.backward()
    return [loss.detach(), *(p.grad.full_tensor() for p in module.parameters())]  # type: ignore[union-attr]


def same(one: list[Any], two: list[Any]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(one, two, strict=True))


class Masks(TorchDispatchMode):
    """What random operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            mask = made[1] if isinstance(made, tuple) else made
            self.drawn.append(mask != 0)
        return made


class Counted:
    """A generator, and what is asked of it."""

    def __init__(self, generator: torch.Generator, asked: Counter[str]) -> None:
        self.generator, self.asked = generator, asked

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self.generator, name)


def masks_of_two_steps(rank: int, pin: str) -> tuple[list[torch.Tensor], bool]:
    """The masks, and whether streams change within a block."""
    module, x = parallel(pin)
    torch.manual_seed(100 + rank)  # users' generators are their own
    with Masks() as masks:
        for _ in range(2):
            module(x)
    mixed = any(isinstance(m, OtherStream) for m in executor_of(module).program.modules())
    return masks.drawn, mixed


def shards(drawn: list[list[torch.Tensor]], call: int) -> list[int]:
    """For each rank the first one that has drawn the same numbers in a call."""
    return [next(i for i, other in enumerate(drawn) if torch.equal(other[call], mine[call])) for mine in drawn]


@pytest.mark.parametrize(("pin", "streams"), [("ddp", [(0, 1)]), ("megatron", [(0, 1), (0,)])])
def test_who_draws_what(pool: Pool, pin: str, streams: list[tuple[int, ...]]) -> None:
    """Ranks that hold the same shard draw the same, others draw others, and no call draws what another one drew."""
    answers = pool(masks_of_two_steps, pin)
    drawn = [masks for masks, _ in answers]
    assert [mixed for _, mixed in answers] == [len(streams) > 1] * 4
    assert len(drawn[0]) == 2 * LAYERS * 2
    for call in range(len(drawn[0])):
        axes = streams[call % len(streams)]
        parts = [tuple(coordinate[axis] for axis in axes) for coordinate in COORDINATES]
        assert shards(drawn, call) == [parts.index(part) for part in parts]
    for masks in drawn:
        texts = [(tuple(mask.shape), mask.numpy().tobytes()) for mask in masks]
        assert len(set(texts)) == len(texts)
    assert all(torch.equal(a, b) for a, b in zip(pool(masks_of_two_steps, pin)[3][0], drawn[3], strict=True))


def recomputed(module: nn.Module) -> int:
    """How many of its layers are computed again."""
    program = executor_of(module).program
    called = [program.get_submodule(str(node.target)) for node in program.graph.nodes if "first" in node.meta]
    return sum(any(isinstance(m, Recomputed) and m.streams for m in layer.modules()) for layer in called)


def asked_in_a_step(rank: int, pin: str, recompute: str) -> tuple[Counter[str], int, bool, int]:
    """What is asked of generators, how often torch forks or seeds all of them, whether the user's was left alone, and
    how many layers are computed again."""
    module, x = parallel(pin, recompute=recompute)
    torch.manual_seed(100 + rank)
    before, asked = torch.get_rng_state(), Counter[str]()
    with (
        patch.object(drawing, "default_generators", lambda _: [Counted(torch.default_generator, asked)]),
        patch("torch.random.fork_rng", wraps=torch.random.fork_rng) as fork,
        patch("torch.manual_seed", wraps=torch.manual_seed) as seed,
        patch("torch.get_rng_state", wraps=torch.get_rng_state) as state,
    ):
        module(x).backward()
    forks = sum(call.kwargs.get("enabled", True) for call in fork.call_args_list)
    untouched = torch.equal(before, torch.get_rng_state())
    return asked, forks + seed.call_count + state.call_count, untouched, recomputed(module)


@pytest.mark.parametrize("recompute", ["none", "selective", "block"])
@pytest.mark.parametrize(("pin", "streams"), [("ddp", 1), ("megatron", 2)])
def test_how_often_generators_are_seeded(pool: Pool, pin: str, streams: int, recompute: str) -> None:
    """Once for each stream of a block, and nothing is forked; a pass sets the user's state aside once, and so does a
    block that is computed again."""
    for asked, elsewhere, untouched, again in pool(asked_in_a_step, pin, recompute):
        assert bool(again) == (recompute != "none")
        seeds, states = (LAYERS + again) * streams, 1 + again
        assert asked == {"manual_seed": seeds, "get_state": states, "set_state": states}
        assert elsewhere == 0 and untouched


def recomputed_steps(rank: int, pin: str, recompute: str) -> list[Any]:
    """Two forward passes, whose backward passes come last, the first one twice (which torch refuses where recomputation
    is selective); then a copy of the module."""
    module, x = parallel(pin, recompute=recompute)
    losses = [module(x), module(x)]
    losses[1].backward()
    if recompute == "selective":
        (2 * losses[0]).backward()
    else:
        losses[0].backward(retain_graph=True)
        losses[0].backward()
    gradients = [p.grad.full_tensor() for p in module.parameters()]  # type: ignore[union-attr]
    twin = copy.deepcopy(module)
    return [*(loss.detach() for loss in losses), *gradients, *step(twin, twin, x)]


@pytest.mark.parametrize("pin", ["ddp", pytest.param("megatron", marks=full)])
def test_computed_again(pool: Pool, pin: str) -> None:
    kept = pool(recomputed_steps, pin, "none")
    assert kept[0][0] != kept[0][1]
    for recompute in ("selective", "block"):
        for answer in pool(recomputed_steps, pin, recompute):
            assert same(answer, kept[0])


def compiled_steps(
    rank: int, pin: str, recompute: str, backend: str
) -> tuple[list[str], int, dict[Any, int], list[Any], bool]:
    """Graph breaks, streams that change in a block, bytes sent, what two steps give, and whether the user's generator
    was left alone."""
    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    counters.clear()
    module, x = parallel(pin, recompute=recompute)
    torch.manual_seed(100 + rank)
    before = torch.get_rng_state()
    called = torch.compile(module, backend=backend) if backend else module
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = [*step(module, called, x), *step(module, called, x)]
    untouched = torch.equal(before, torch.get_rng_state())
    changes = sum(isinstance(m, OtherStream) for m in executor_of(module).program.modules())
    sent = executor_of(module).count.forward + executor_of(module).count.backward
    return list(counters["graph_break"]), changes, dict(sent), found, untouched


@pytest.mark.parametrize("recompute", [pytest.param(r, marks=full) for r in ("none", "selective", "block")])
def test_compiled_without_graph_breaks(pool: Pool, recompute: str) -> None:
    """One stream in a block: it is started before, and the block is compiled in one piece, to the same numbers."""
    eager = pool(compiled_steps, "ddp", recompute, "")
    for breaks, changes, sent, found, untouched in pool(compiled_steps, "ddp", recompute, "aot_eager"):
        assert breaks == [] and changes == 0 and sent == eager[0][2]
        assert same(found, eager[0][3]) and untouched


@pytest.mark.parametrize("recompute", ["none", pytest.param("block", marks=full)])
def test_compiled_with_several_streams(pool: Pool, recompute: str) -> None:
    """A graph break where the stream changes within a block, and the same numbers."""
    eager = pool(compiled_steps, "megatron", recompute, "")
    for breaks, changes, _, found, untouched in pool(compiled_steps, "megatron", recompute, "aot_eager"):
        assert changes and breaks and all("Draws.start" in b or "Recomputed.uncompiled" in b for b in breaks)
        assert same(found, eager[0][3]) and untouched
