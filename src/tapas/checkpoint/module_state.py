"""A module's tensors by name, how they fit what a file holds, and the boxes of each that this rank has.

A packed weight (`_StridedShard`) is several boxes on each rank. torch's own checkpoint planner takes it
for one, so that the boxes are worked out here.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tapas._torch import uncompiled
from tapas.errors import TapasError
from tapas.sharding.layout import pieces

SHOWN = 8  # names in a message
Ranges = tuple[tuple[int, int], ...]


class CheckpointError(TapasError):
    """Weights or checkpoints that cannot be read or written."""

    def __reduce__(self) -> Any:  # torch sends it from rank to rank
        return type(self), (self.place, self.fact, self.remedy)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a module, with all of its names: tied weights have several."""

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return self.names[0]


def entries(module: nn.Module) -> list[Entry]:
    """Parameters and persistent buffers, each once, in the module's order."""
    module = uncompiled(module)
    by_identity: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(name, "is not a tensor", "keep such state in `extra`")
        if value.is_meta:
            raise CheckpointError(name, "is on the meta device", "give it memory first: module.to_empty(device=...)")
        by_identity.setdefault(id(value), ([], value))[0].append(name)
    return [Entry(tuple(names), tensor) for names, tensor in by_identity.values()]


def listed(names: Collection[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")


def match(
    place: str, wanted: Sequence[Entry], stored: Collection[str], aliases: Mapping[str, str]
) -> list[tuple[Entry, tuple[str, ...]]]:
    """For each entry the names under which it is stored: one, or several where tied weights were stored apart."""
    matched = []
    for entry in wanted:
        names = (name if name in stored else aliases.get(name, "") for name in entry.names)
        matched.append((entry, tuple(dict.fromkeys(name for name in names if name in stored))))
    missing = [entry.name for entry, names in matched if not names]
    unexpected = set(stored) - {name for _, names in matched for name in names}
    facts = [f"has no {listed(missing)}"] if missing else []
    facts += [f"has {listed(unexpected)}, which the module does not have"] if unexpected else []
    if facts:
        raise CheckpointError(place, "; ".join(facts), "load it into the model it was made from")
    return matched


def check_shapes(
    place: str, matched: Sequence[tuple[Entry, tuple[str, ...]]], shape: Callable[[str], Sequence[int]]
) -> None:
    wrong = [
        f"{name} has shape {tuple(shape(name))} instead of {tuple(entry.tensor.shape)}"
        for entry, names in matched
        for name in names
        if tuple(shape(name)) != tuple(entry.tensor.shape)
    ]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise CheckpointError(place, ", ".join(wrong[:SHOWN]) + more, "load it into the model it was made from")


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
    ranges: list[tuple[int, int]] = []
    for low, high in taken:
        offset = 0
        for start, stop in held:
            first, last = max(start + low - offset, start), min(start + high - offset, stop)
            if first < last:
                ranges.append((first, last))
            offset += stop - start
    return tuple(ranges)


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
    return [box for box in cut(mine, held) if prod(box.sizes)]


def cut(part: torch.Tensor, held: Sequence[Ranges]) -> Iterator[Box]:
    """The boxes of a part that holds these ranges of every dim."""
    for numbers in product(*(range(len(ranges)) for ranges in held)):
        view, offsets = part, []
        for dim, k in enumerate(numbers):
            start, stop = held[dim][k]
            view = view.narrow(dim, sum(b - a for a, b in held[dim][:k]), stop - start)
            offsets.append(start)
        yield Box(tuple(offsets), view)
