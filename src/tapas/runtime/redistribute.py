"""A tensor changes its plain state (S, R or P) along some axes: what each row of the move table does.

Everything that depends on shapes is worked out once, when a program is made. Shards may be uneven (they
are padded on the wire) and a dim may consist of segments that are split each by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, product
from math import prod

import torch

from tapas.runtime.collectives import Axis, Rank
from tapas.runtime.packing import Deal, Packing, Ranges
from tapas.sharding.layout import Layout, State, pieces, split_of
from tapas.sharding.route import conversion


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
            case "slice" | "pad" | "none":
                return self.local(x)
            case "all_reduce":
                self._note(rank, phase, x.numel() * x.element_size())
                rank.count.copies[phase] += x.numel() > 0
                return _all_reduce(x, [rank.wires[a] for a in self.axes])
            case "all_gather":
                return self._all_gather(x, rank, phase)
            case "reduce_scatter":
                return self._reduce_scatter(x, rank, phase)
            case "all_to_all":
                held = max(x.numel(), prod(self.shape(x.shape)))  # by this device, at the end where that is more
                self._note(rank, phase, held * x.element_size())
                return self._all_to_all(x, rank, phase)
        raise ValueError(self.kind)

    def local(self, x: torch.Tensor) -> torch.Tensor:
        """Where nothing is sent."""
        if self.kind == "slice":
            assert self.new is not None
            return self.new.take(x, self.new.mine)
        if self.kind == "pad":
            assert self.old is not None
            whole = x.new_zeros(self.old.whole_shape(x.shape))
            self.old.put(whole, self.old.mine, x)
            return whole
        return x if self.keeps else torch.zeros_like(x)

    def packing(self, sizes: Sequence[int]) -> Packing:
        """Of what a gather or a scatter deals out, over axes of these sizes."""
        deal = self.old or self.new
        assert deal is not None
        return Packing(deal, tuple(sizes))

    @cached_property
    def joint(self) -> Packing:
        """The same over all axes at once."""
        deal = self.old or self.new
        assert deal is not None
        return Packing(deal, (len(deal.members),))

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

    def _all_gather(self, x: torch.Tensor, rank: Rank, phase: str) -> torch.Tensor:
        packing = self.packing([rank.wires[a].size for a in self.axes])
        flat = packing.pack_part(x)
        self._note(rank, phase, packing.numel(x.shape) * x.element_size())
        rank.count.copied(phase, x, flat)
        for a in self.axes:  # over the slow outer axis while pieces are small
            flat = rank.wires[a].all_gather(flat)
        whole = packing.unpack(flat, x.shape)
        rank.count.copied(phase, flat, whole)
        return whole

    def _reduce_scatter(self, x: torch.Tensor, rank: Rank, phase: str) -> torch.Tensor:
        packing = self.packing([rank.wires[a].size for a in self.axes])
        flat = packing.pack(x)
        self._note(rank, phase, flat.numel() * flat.element_size())
        rank.count.copied(phase, x, flat)
        for a in reversed(self.axes):
            flat = rank.wires[a].reduce_scatter(flat)
        return packing.own_part(flat, x.shape)

    def _all_to_all(self, x: torch.Tensor, rank: Rank, phase: str) -> torch.Tensor:
        assert self.old is not None and self.new is not None
        wire = rank.wires[self.axes[0]]
        if self.old.dim == self.new.dim:
            result = self._redeal(x, wire)
            rank.count.copies[phase] += (x.numel() > 0) + (result.numel() > 0)
            return result
        leaving, coming = (Packing(deal, (wire.size,), padded=False) for deal in (self.new, self.old))
        part = self.new.shape(x.shape, self.new.mine)
        sent, received = ([n for *_, n in p.places(shape)] for p, shape in ((leaving, x.shape), (coming, part)))
        flat = leaving.pack(x)
        got = wire.all_to_all(flat, sent, received)
        result = coming.unpack(got, part)
        rank.count.copied(phase, x, flat)
        rank.count.copied(phase, got, result)
        return result

    def _redeal(self, x: torch.Tensor, wire: Axis) -> torch.Tensor:
        """The same dim dealt out in another way."""
        assert self.old is not None and self.new is not None
        leaving, sent, coming, received = self._exchanged
        rows = x.movedim(self.old.dim, 0)
        width = prod(rows.shape[1:])
        flat = rows.index_select(0, _index(leaving, x.device)).view(-1)
        got = wire.all_to_all(flat, [n * width for n in sent], [n * width for n in received])
        result = x.new_empty(self.shape(x.shape))
        made = result.movedim(self.old.dim, 0)
        made.index_copy_(0, _index(coming, x.device), got.view(made.shape))
        return result

    @cached_property
    def _exchanged(self) -> tuple[tuple[int, ...], list[int], tuple[int, ...], list[int]]:
        """Which rows leave, how many for each member, where those that come belong, how many come from each. What
        both have is listed in the order of the dim."""
        assert self.old is not None and self.new is not None
        mine, wanted = (_positions(deal.members[deal.mine]) for deal in (self.old, self.new))

        def common(own: list[int], other: Ranges) -> list[int]:
            rows = set(_positions(other))
            return sorted((i for i, position in enumerate(own) if position in rows), key=lambda i: own[i])

        leaving = [common(mine, held) for held in self.new.members]
        coming = [common(wanted, held) for held in self.old.members]
        return tuple(chain(*leaving)), list(map(len, leaving)), tuple(chain(*coming)), list(map(len, coming))


@lru_cache(256)
def _index(rows: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """On the device once, not in every step."""
    return torch.tensor(rows, dtype=torch.long, device=device)


def _positions(ranges: Ranges) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


def _all_reduce(x: torch.Tensor, wires: Sequence[Axis]) -> torch.Tensor:
    """Over several axes: scattered over the inner ones first, so that little crosses the slow outer one."""
    if len(wires) == 1:
        return wires[0].all_reduce(x)
    flat = x.reshape(-1)
    n = wires[-1].size
    length = -(-flat.numel() // n)
    if flat.numel() < length * n:
        flat = torch.cat([flat, flat.new_zeros(length * n - flat.numel())])
    part = wires[-1].reduce_scatter(flat)
    part = _all_reduce(part, wires[:-1])
    return wires[-1].all_gather(part)[: x.numel()].view(x.shape)


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
