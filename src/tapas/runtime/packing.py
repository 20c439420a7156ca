"""How a tensor lies in the buffer of a collective: the members' parts one after the other, each as it would lie by
itself. Where parts differ and have to have one length, the shorter ones are padded at their end.

A tensor is copied at most once on its way into a buffer, and once on its way out of it; not at all where the dim is the
first one, or those before it have size 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import dropwhile, product
from math import prod

import torch

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Deal:
    """How a dim is dealt out to the ranks along some axes, in the frame that those ranks share."""

    dim: int
    members: tuple[Ranges, ...]  # per member (outer axis major): the ranges it holds, one per segment
    mine: int  # which member this rank is
    lengths: tuple[int, ...] = field(init=False)  # of the members' parts; torch.compile reads them, too

    def __post_init__(self) -> None:
        lengths = tuple(sum(stop - start for start, stop in held) for held in self.members)
        object.__setattr__(self, "lengths", lengths)

    @cached_property
    def even(self) -> bool:
        """Whether all members have the same, in one piece."""
        return len(self.members[0]) == 1 and len(set(self.lengths)) == 1

    @cached_property
    def padded_at_the_end(self) -> bool:
        """Whether the parts, each padded to the same length, begin with the whole if the dim is the first one."""
        shorter = [*dropwhile(lambda length: length == self.lengths[0], self.lengths)]
        return len(self.members[0]) == 1 and not any(shorter[1:])

    def take(self, x: torch.Tensor, member: int) -> torch.Tensor:
        parts = [x.narrow(self.dim, start, stop - start) for start, stop in self.members[member]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def put(self, whole: torch.Tensor, member: int, part: torch.Tensor) -> None:
        at = 0
        for start, stop in self.members[member]:
            whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, at, stop - start))
            at += stop - start

    def shape(self, shape: Sequence[int], member: int) -> tuple[int, ...]:
        """Of a member's part of a tensor, whatever part of it `shape` is of."""
        return (*shape[: self.dim], self.lengths[member], *shape[self.dim + 1 :])

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[: self.dim], sum(self.lengths), *shape[self.dim + 1 :])


@dataclass(frozen=True)
class Packing:
    """Into a buffer, and out of one. Where a collective goes over one axis after the other, parts lie in the buffer
    with the last axis major: `sizes` are those of the axes, or that of all of them at once."""

    deal: Deal
    sizes: tuple[int, ...]
    padded: bool = True  # parts have one length

    def places(self, shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Members with where in a buffer their parts begin, and how many elements they have."""
        numels = [prod(self.deal.shape(shape, member)) for member in range(len(self.deal.members))]
        strides = [prod(self.sizes[:i]) for i in range(len(self.sizes))]
        start = 0
        for member, place in enumerate(product(*map(range, self.sizes))):
            if self.padded:
                start = max(numels) * sum(i * stride for i, stride in zip(place, strides, strict=True))
            yield member, start, numels[member]
            start += numels[member]

    def numel(self, shape: Sequence[int]) -> int:
        numels = [prod(self.deal.shape(shape, member)) for member in range(len(self.deal.members))]
        return len(numels) * max(numels) if self.padded else sum(numels)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """A whole, to be dealt out."""
        dim, axes = self.deal.dim, len(self.sizes)
        if not self.padded and x.shape[:dim].numel() == 1 and len(self.deal.members[0]) == 1:
            return x.contiguous().view(-1)
        if self.deal.even:
            parts = x.unflatten(dim, (*self.sizes, self.deal.lengths[0]))
            major = [dim + axis for axis in reversed(range(axes))]
            others = [d for d in range(parts.dim()) if d not in major]
            return parts.permute(*major, *others).contiguous().view(-1)
        flat = x.new_empty(self.numel(x.shape))
        if self.padded:
            flat.zero_()
        for member, start, numel in self.places(x.shape):
            shape, at = self.deal.shape(x.shape, member), 0
            part = flat[start : start + numel].view(shape)
            for first, stop in self.deal.members[member]:
                part.narrow(dim, at, stop - first).copy_(x.narrow(dim, first, stop - first))
                at += stop - first
        return flat

    def own_part(self, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """From what a member is left with of a buffer that was dealt out; `shape`: of the whole."""
        mine = self.deal.shape(shape, self.deal.mine)
        return flat[: prod(mine)].view(mine)

    def pack_part(self, part: torch.Tensor) -> torch.Tensor:
        """A member's own, to be put together with the others'."""
        flat, longest = part.contiguous().view(-1), self.numel(part.shape) // len(self.deal.members)
        if flat.numel() == longest:
            return flat
        padded = flat.new_zeros(longest)
        padded[: flat.numel()] = flat
        return padded

    def arrives_whole(self, shape: Sequence[int]) -> bool:
        """Whether a buffer with all members' parts, of which this is one's shape, begins with the whole."""
        first = prod(shape[: self.deal.dim]) == 1 and len(self.deal.members[0]) == 1
        return first and (not self.padded or (len(self.sizes) == 1 and self.deal.padded_at_the_end))

    def lies_in_parts(self, shape: Sequence[int]) -> bool:
        """Whether a whole, of which a member has a part of this shape, is equal parts one after the other."""
        return self.deal.even and len(self.sizes) == 1 and prod(shape[: self.deal.dim]) == 1

    def unpack(self, flat: torch.Tensor, shape: Sequence[int], whole: torch.Tensor | None = None) -> torch.Tensor:
        """The whole, from all members' parts; `shape`: of one. If `whole` is given, it is filled."""
        made = self.deal.whole_shape(shape)
        if whole is None:
            if self.arrives_whole(shape):
                return flat[: prod(made)].view(made)
            whole = flat.new_empty(made)
        if self.deal.even:
            lead, axes = prod(shape[: self.deal.dim]), len(self.sizes)
            each = prod(made) // lead // len(self.deal.members) if lead else 0
            parts = flat.view(*reversed(self.sizes), lead, each)
            whole.view(lead, *self.sizes, each).copy_(parts.permute(axes, *reversed(range(axes)), axes + 1))
            return whole
        for member, start, numel in self.places(shape):
            self.deal.put(whole, member, flat[start : start + numel].view(self.deal.shape(shape, member)))
        return whole
