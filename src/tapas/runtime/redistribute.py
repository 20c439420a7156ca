"""A tensor changes its plain state (S, R or P) along some axes: what each row of the move table does.

Everything that depends on shapes is worked out once, when a program is made. Shards may be uneven (they
are padded on the wire) and a dim may consist of segments that are split each by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from tapas.runtime.collectives import Axis, Rank
from tapas.sharding.layout import Layout, State, pieces, split_of
from tapas.sharding.route import conversion

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Deal:
    """How a dim is dealt out to the ranks along some axes, in the frame that those ranks share."""

    dim: int
    members: tuple[Ranges, ...]  # per member (outer axis major): the ranges it holds, one per segment
    mine: int  # which member this rank is

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in held) for held in self.members)

    @property
    def side_by_side(self) -> bool:
        """Whether the members' parts, one after the other in memory, are the whole."""
        return self.dim == 0 and len(self.members[0]) == 1 and len(set(self.lengths)) == 1

    def take(self, x: torch.Tensor, member: int) -> torch.Tensor:
        parts = [x.narrow(self.dim, start, stop - start) for start, stop in self.members[member]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole, from what the members hold."""
        segments = len(self.members[0])
        if segments == 1:
            return torch.cat(list(parts), self.dim)
        split = [
            part.split([stop - start for start, stop in held], self.dim)
            for part, held in zip(parts, self.members, strict=True)
        ]
        return torch.cat([split[m][s] for s in range(segments) for m in range(len(parts))], self.dim)


def deal(
    shape: Sequence[int], layout: Layout, mesh: Sequence[int], coord: Sequence[int], axes: tuple[int, ...], state: State
) -> Deal:
    """`layout` is the tensor's layout with `axes` in `state`; axes further out may split the same dim."""
    size, tiling = shape[state.dim], state.tiling
    splitting, _ = split_of(layout, state.dim)
    outer = [a for a in splitting if a not in axes]
    frame = pieces(size, tiling, [mesh[a] for a in outer], [coord[a] for a in outer])
    offsets, total = [], 0
    for start, stop in frame:
        offsets.append(total - start)
        total += stop - start
    every = sorted({*outer, *axes})
    members, mine = [], 0
    for number, place in enumerate(product(*(range(mesh[a]) for a in axes))):
        where = dict(zip(axes, place, strict=True))
        held = pieces(size, tiling, [mesh[a] for a in every], [where.get(a, coord[a]) for a in every])
        members.append(tuple((a + o, b + o) for (a, b), o in zip(held, offsets, strict=True)))
        if place == tuple(coord[a] for a in axes):
            mine = number
    return Deal(state.dim, tuple(members), mine)


@dataclass(frozen=True)
class Conversion:
    """One conversion on one rank: old and new plain state along `axes`, the same on all of them."""

    kind: str
    axes: tuple[int, ...]
    old: Deal | None
    new: Deal | None
    keeps: bool  # R -> P: this rank is the one that keeps the value

    def __call__(self, x: torch.Tensor, rank: Rank, phase: str) -> torch.Tensor:
        match self.kind:
            case "slice":
                assert self.new is not None
                return self.new.take(x, self.new.mine)
            case "pad":
                return self._pad(x)
            case "none":
                return x if self.keeps else torch.zeros_like(x)
            case "all_reduce":
                self._note(rank, phase, x.numel() * x.element_size())
                return _all_reduce(x, [rank.wires[a] for a in self.axes])
            case "all_gather":
                return self._all_gather(x, rank, phase)
            case "reduce_scatter":
                return self._reduce_scatter(x, rank, phase)
            case "all_to_all":
                held = max(x.numel(), prod(self.shape(x.shape)))  # by this device, at the end where that is more
                self._note(rank, phase, held * x.element_size())
                return self._all_to_all(x, rank.wires[self.axes[0]])
        raise ValueError(self.kind)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what comes out."""
        result = list(shape)
        if self.old is not None and self.kind in ("pad", "all_gather", "all_to_all"):
            result[self.old.dim] = sum(self.old.lengths)
        if self.new is not None and self.kind in ("slice", "reduce_scatter", "all_to_all"):
            result[self.new.dim] = self.new.lengths[self.new.mine]
        return tuple(result)

    def _note(self, rank: Rank, phase: str, nbytes: int) -> None:
        rank.count.add(phase, self.kind, self.axes, nbytes)

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        assert self.old is not None
        parts = []
        for m, length in enumerate(self.old.lengths):
            shape = list(x.shape)
            shape[self.old.dim] = length
            parts.append(x if m == self.old.mine else x.new_zeros(shape))
        return self.old.join(parts)

    def _all_gather(self, x: torch.Tensor, rank: Rank, phase: str) -> torch.Tensor:
        assert self.old is not None
        deal, longest = self.old, max(self.old.lengths)
        flat = _padded(x.movedim(deal.dim, 0), longest)
        rest = flat.shape[1:]
        self._note(rank, phase, flat.numel() * flat.element_size() * len(deal.members))
        for a in self.axes:  # over the slow outer axis while pieces are small
            flat = rank.wires[a].all_gather(flat)
        if len(self.axes) == 1 and deal.side_by_side:
            return flat
        sizes = [rank.wires[a].size for a in self.axes]
        stacked = flat.reshape(*reversed(sizes), longest, *rest)
        stacked = stacked.permute(*reversed(range(len(sizes))), *range(len(sizes), stacked.dim()))
        stacked = stacked.reshape(len(deal.members), longest, *rest)
        parts = [stacked[m, :length].movedim(0, deal.dim) for m, length in enumerate(deal.lengths)]
        return deal.join(parts)

    def _reduce_scatter(self, x: torch.Tensor, rank: Rank, phase: str) -> torch.Tensor:
        flat = self.dealt_out(x, [rank.wires[a].size for a in self.axes])
        self._note(rank, phase, flat.numel() * flat.element_size())
        for a in reversed(self.axes):
            flat = rank.wires[a].reduce_scatter(flat)
        # attention takes other ways, which keep all scores, where features do not lie side by side
        return self.received(flat).contiguous()

    def dealt_out(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """What a reduce-scatter sends: the members' parts, padded to the same length, one after the other."""
        assert self.new is not None
        deal, longest = self.new, max(self.new.lengths)
        if len(sizes) == 1 and deal.side_by_side:
            return x.contiguous()
        parts = [_padded(deal.take(x, m).movedim(deal.dim, 0), longest) for m in range(len(deal.members))]
        rest = parts[0].shape[1:]
        stacked = torch.stack(parts).reshape(*sizes, longest, *rest)
        stacked = stacked.permute(*reversed(range(len(sizes))), *range(len(sizes), stacked.dim()))
        return stacked.reshape(len(deal.members) * longest, *rest)  # -1 would be ambiguous where nothing is held

    def received(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part, from what a reduce-scatter hands back."""
        assert self.new is not None
        return flat[: self.new.lengths[self.new.mine]].movedim(0, self.new.dim)

    def _all_to_all(self, x: torch.Tensor, wire: Axis) -> torch.Tensor:
        assert self.old is not None and self.new is not None
        if self.old.dim == self.new.dim:
            return self._redeal(x, wire)
        old, new = self.old, self.new
        sent = [new.take(x, m).reshape(-1) for m in range(len(new.members))]
        shape = list(x.shape)
        shape[new.dim] = new.lengths[new.mine]
        shapes = []
        for length in old.lengths:
            shape[old.dim] = length
            shapes.append(tuple(shape))
        got = wire.all_to_all(torch.cat(sent), [s.numel() for s in sent], [prod(s) for s in shapes])
        parts = got.split([prod(s) for s in shapes])
        return old.join([part.reshape(s) for part, s in zip(parts, shapes, strict=True)])

    def _redeal(self, x: torch.Tensor, wire: Axis) -> torch.Tensor:
        """The same dim dealt out in another way."""
        assert self.old is not None and self.new is not None
        old, new, dim = self.old, self.new, self.old.dim
        mine, wanted = _positions(old.members[old.mine]), _positions(new.members[new.mine])
        flat = x.movedim(dim, 0)
        where = {position: i for i, position in enumerate(mine)}
        leaving = [[where[p] for p in _positions(held) if p in where] for held in new.members]
        target = {position: i for i, position in enumerate(wanted)}
        coming = [[target[p] for p in _positions(held) if p in target] for held in old.members]
        # both sides list the common positions in the order of the other's ranges: sort them alike
        leaving = [sorted(rows, key=lambda i: mine[i]) for rows in leaving]
        coming = [sorted(rows, key=lambda i: wanted[i]) for rows in coming]
        width = prod(flat.shape[1:])
        sent = torch.cat([flat[rows].reshape(-1) for rows in leaving])
        got = wire.all_to_all(sent, [len(r) * width for r in leaving], [len(r) * width for r in coming])
        result = flat.new_empty((len(wanted), *flat.shape[1:]))
        for part, rows in zip(got.split([len(r) * width for r in coming]), coming, strict=True):
            result[rows] = part.reshape(len(rows), *flat.shape[1:])
        return result.movedim(0, dim).contiguous()


def _positions(ranges: Ranges) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    if x.shape[0] == length:
        return x
    return torch.cat([x, x.new_zeros((length - x.shape[0], *x.shape[1:]))])


def _all_reduce(x: torch.Tensor, wires: Sequence[Axis]) -> torch.Tensor:
    """Over several axes: scattered over the inner ones first, so that little crosses the slow outer one."""
    if len(wires) == 1:
        return wires[0].all_reduce(x)
    flat = x.reshape(-1)
    n = wires[-1].size
    length = -(-flat.numel() // n)
    part = wires[-1].reduce_scatter(_padded(flat, length * n))
    part = _all_reduce(part, wires[:-1])
    return wires[-1].all_gather(part)[: flat.numel()].reshape(x.shape)


def convert(
    shape: Sequence[int], layout: Layout, axes: tuple[int, ...], old: State, new: State, rank: Rank
) -> Conversion:
    """Plain states: the value states going forward, the gradient states going back."""

    def dealt(state: State) -> Deal | None:
        if not state.sharded:
            return None
        here = tuple(state if a in axes else s for a, s in enumerate(layout))
        return deal(shape, here, rank.mesh, rank.coord, axes, state)

    kind = conversion(old, new)
    keeps = old == new or not (old.kind == "R" and new.kind == "P") or all(rank.coord[a] == 0 for a in axes)
    return Conversion(kind, axes, dealt(old), dealt(new), keeps)
