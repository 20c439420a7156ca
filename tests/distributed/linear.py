"""Every route between two layouts, run on one rank: values forward, gradients back."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from tapas.cost.collectives import ClusterRouter
from tapas.hardware.mesh import parse_mesh
from tapas.ir.graph import Tensor
from tapas.runtime.collectives import Axis, Count, Rank
from tapas.runtime.moves import steps
from tapas.runtime.parts import shard
from tapas.sharding.layout import B, Layout, P, R, S, State
from tapas.sharding.routing import LayoutSpace, RouteStep
from tests.distributed.small import EAGER

Coord = tuple[int, ...]
Result = dict[tuple[int, int], tuple[torch.Tensor, ...]]  # (source, target) -> x, F x, y, F* y on this rank

# sizes that do not divide, a dim of three packed segments dealt out in pairs, and one plain split of the same dim
SHAPE = (7, 24)
STATES = (S(0), S(1), S(1, ((8, 2),) * 3), R, B, P)


def space_of(mesh: Sequence[int]) -> LayoutSpace:
    return ClusterRouter(parse_mesh(tuple(mesh)), EAGER).space(Tensor("x", SHAPE, "float64", True), STATES)


def pairs_of(space: LayoutSpace, limit: int) -> list[tuple[int, int]]:
    """All pairs of layouts, or as many of them, evenly spread."""
    every = [(i, j) for i, j in product(range(len(space)), repeat=2) if i != j]
    return every[:: max(1, len(every) // limit)]


def seeded(*key: Any) -> torch.Generator:
    number = 0
    for part in key:
        number = (number * 1000003 + int(part) + 1) % 2**31
    return torch.Generator().manual_seed(number)


def held(layout: Layout, kind: str, mesh: Sequence[int], coord: Coord, key: tuple[int, ...]) -> torch.Tensor:
    """A rank's part of a random tensor: alike where it is whole, its own where it is a partial sum."""
    plain: tuple[State, ...] = tuple(getattr(state, kind) for state in layout)
    own = [i if s.kind == "P" else 0 for s, i in zip(plain, coord, strict=True)]
    # whole numbers: sums are exact in any order
    whole = torch.randint(-99, 100, SHAPE, generator=seeded(*key, *own)).double()
    return shard(whole, plain, mesh, coord).clone()


def ways(space: LayoutSpace, source: int, target: int) -> list[RouteStep]:
    """A single step where there is one, however dear; or the cheapest route."""
    single = np.isfinite(space.steps[0][source, target])
    return [space.step(source, target)] if single else space.route(source, target)


def run_routes(mesh: Sequence[int], coord: Coord, wires: Sequence[Axis], limit: int) -> Result:
    space, found = space_of(mesh), {}
    rank = Rank(tuple(mesh), coord, wires, Count(), torch.device("cpu"))
    for i, j in pairs_of(space, limit):
        x = held(space.layout(i), "value", mesh, coord, (i, j, 0)).requires_grad_()
        y = held(space.layout(j), "gradient", mesh, coord, (i, j, 1))
        z = x
        route = tuple(step.hop for step in ways(space, i, j))
        for step in steps(SHAPE, space.layout(i), route, rank):
            z = step(z)
        z.backward(y)
        assert x.grad is not None
        found[i, j] = tuple(t.detach().clone() for t in (x, z, y, x.grad))
    return found


def inner(a: dict[Coord, torch.Tensor], b: dict[Coord, torch.Tensor], layout: Layout) -> float:
    """The inner product of a logical tensor with a logical gradient: what is whole in both counts once."""
    once = [axis for axis, state in enumerate(layout) if state == R]
    return sum(float((a[c] * b[c]).sum()) for c in a if not any(c[axis] for axis in once))


def assembled(parts: dict[Coord, torch.Tensor], layout: Layout, mesh: Sequence[int]) -> torch.Tensor:
    """The whole logical tensor, from values or gradients in these plain states."""
    positions = torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    whole = torch.zeros(SHAPE[0] * SHAPE[1], dtype=torch.float64)
    for coord, part in parts.items():
        if not any(coord[a] for a, state in enumerate(layout) if state.kind == "R"):
            whole.index_add_(0, shard(positions, layout, mesh, coord).reshape(-1), part.reshape(-1))
    return whole.reshape(SHAPE)


def check_routes(results: dict[Coord, Result], mesh: Sequence[int]) -> int:
    """Each route is a linear operator with its adjoint, and changes no logical tensor."""
    space = space_of(mesh)
    pairs = next(iter(results.values())).keys()
    for i, j in pairs:
        x, z, y, g = ({c: result[i, j][k] for c, result in results.items()} for k in range(4))
        before, after = space.layout(i), space.layout(j)
        text = f"{before} -> {after}"
        assert inner(z, y, after) == inner(x, g, before), text
        for parts, layout, others, wanted in (
            (x, tuple(s.value for s in before), z, tuple(s.value for s in after)),
            (y, tuple(s.gradient for s in after), g, tuple(s.gradient for s in before)),
        ):
            assert torch.equal(assembled(parts, layout, mesh), assembled(others, wanted, mesh)), text
    return len(pairs)
