"""Dealing tensors out to the ranks of a mesh as a layout says, and putting them together again."""

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch

from tapas.sharding.layout import Layout, local_pieces
from tests.oracle.case import like
from tests.oracle.threads import Coord


def ranks(mesh: Sequence[int]) -> list[Coord]:
    return list(itertools.product(*(range(n) for n in mesh)))


@lru_cache(maxsize=1 << 15)
def held(shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...], coord: Coord) -> tuple[torch.Tensor, ...]:
    """The global indices per dim that a rank holds, shaped so that together they index the tensor."""
    pieces = local_pieces(shape, layout, mesh, coord)
    return tuple(
        torch.tensor([i for start, stop in ranges for i in range(start, stop)], dtype=torch.long).view(
            -1, *[1] * (len(shape) - dim - 1)
        )
        for dim, ranges in enumerate(pieces)
    )


def cut(x: torch.Tensor, index: Sequence[torch.Tensor]) -> torch.Tensor:
    for dim, rows in enumerate(index):
        if rows.numel() < x.shape[dim]:
            x = x.index_select(dim, rows.view(-1))
    return x.clone()


def deal(x: torch.Tensor, layout: Layout, mesh: Sequence[int]) -> dict[Coord, torch.Tensor]:
    """What each rank holds: pieces on S axes, random parts that add up on P axes, copies elsewhere."""
    summed = [axis for axis, state in enumerate(layout) if state.kind == "P"]
    keys = ranks([mesh[a] for a in summed])
    parts = {key: like(x) for key in keys[1:]}
    parts[keys[0]] = x - sum(parts.values()) if parts else x  # type: ignore[operator]
    return {
        coord: cut(parts[tuple(coord[a] for a in summed)], held(tuple(x.shape), layout, tuple(mesh), coord))
        for coord in ranks(mesh)
    }


def combine(
    local: dict[Coord, torch.Tensor], layout: Layout, mesh: Sequence[int], shape: Sequence[int], dtype: torch.dtype
) -> list[torch.Tensor]:
    """The whole tensor, once for each place on the axes where it is replicated."""
    copies = [axis for axis, state in enumerate(layout) if state.kind in "RB"]
    whole: dict[Coord, torch.Tensor] = {}
    for coord, x in local.items():
        target = whole.setdefault(tuple(coord[a] for a in copies), torch.zeros(tuple(shape), dtype=dtype))
        if not shape:
            target += x
        elif x.numel():
            index = held(tuple(shape), layout, tuple(mesh), coord)
            target.index_put_(index, x.to(dtype), accumulate=True)
    return list(whole.values())


def values(layout: Layout) -> Layout:
    return tuple(state.value for state in layout)


def gradients(layout: Layout) -> Layout:
    return tuple(state.gradient for state in layout)
