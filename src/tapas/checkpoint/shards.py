"""What a rank holds of a tensor, as boxes of the whole one.

A packed weight (`_StridedShard`) is several boxes on each rank. torch's own checkpoint planner takes it
for one, so that the boxes are worked out here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tapas.checkpoint.module_state import CheckpointError
from tapas.sharding.layout import pieces

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Box:
    offsets: tuple[int, ...]  # in the whole tensor
    view: torch.Tensor  # of this rank's memory

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.view.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


def held_ranges(
    name: str, shape: Sequence[int], placements: Sequence[Any], mesh: Sequence[int], coord: Sequence[int]
) -> list[Ranges]:
    """For every dim, the ranges of it that the rank at `coord` holds, in the order in which it holds them."""
    held: list[Ranges] = [((0, size),) for size in shape]
    for placement, n, i in zip(placements, mesh, coord, strict=True):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise CheckpointError(name, f"is {placement}", "sum it up before it is saved or loaded")
        segments = getattr(placement, "split_factor", 1)  # only packed weights have some
        total = sum(stop - start for start, stop in held[placement.dim])
        if segments > 1 and total % (segments * n):  # torch and TAPAS would deal them out differently
            raise CheckpointError(name, f"has {segments} segments of {total} rows over {n} ranks", "split it evenly")
        held[placement.dim] = _split(held[placement.dim], segments, n, i)
    return held


def _split(held: Ranges, segments: int, n: int, i: int) -> Ranges:
    total = sum(stop - start for start, stop in held)
    taken = pieces(total, ((total // segments, 1),) * segments, (n,), (i,))
    found: list[tuple[int, int]] = []
    for low, high in taken:
        offset = 0
        for start, stop in held:
            first, last = max(start + low - offset, start), min(start + high - offset, stop)
            if first < last:
                found.append((first, last))
            offset += stop - start
    return tuple(found)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor: writing to it writes to the tensor."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def ranges_at(name: str, tensor: DTensor, coord: Sequence[int]) -> list[Ranges]:
    return held_ranges(name, tensor.shape, tensor.placements, tuple(tensor.device_mesh.shape), coord)


def boxes(name: str, tensor: torch.Tensor) -> list[Box]:
    """The boxes of a tensor that this rank holds; none is empty unless the tensor is."""
    mine = local(tensor)
    held: list[Ranges] = [((0, size),) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coord = tensor.device_mesh.get_coordinate()
        if coord is None:
            return []
        held = ranges_at(name, tensor, coord)
    expected = tuple(sum(stop - start for start, stop in ranges) for ranges in held)
    if tuple(mine.shape) != expected:
        raise CheckpointError(
            name, f"this rank holds {tuple(mine.shape)}, its placement says {expected}", "place it as DTensor does"
        )
    if not tensor.numel():
        return [Box((0,) * tensor.ndim, mine.new_empty(tensor.shape))]
    return [b for b in _cut(held, mine) if prod(b.sizes)]


def _cut(held: Sequence[Ranges], mine: torch.Tensor) -> list[Box]:
    found = []
    for choice in product(*(range(len(ranges)) for ranges in held)):
        view, offsets = mine, []
        for dim, k in enumerate(choice):
            start, stop = held[dim][k]
            before = sum(b - a for a, b in held[dim][:k])
            view = view.narrow(dim, before, stop - start)
            offsets.append(start)
        found.append(Box(tuple(offsets), view))
    return found
