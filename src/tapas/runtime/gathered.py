"""Weights that are stored split, on their way to the ranks that use them."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tapas._torch import RESIZE_MEMORY
from tapas.runtime.collectives import Axes, Count, Side
from tapas.runtime.joined import Joined, joined
from tapas.runtime.moves import Step
from tapas.runtime.redistribute import Conversion


@dataclass(frozen=True)
class GatheredWeight:
    """A weight as a block takes it."""

    parameter: str
    steps: tuple[Step, ...]  # from how it is stored; they gather, or do nothing but sum its gradient
    again: bool  # it is freed after the forward pass, and gathered again for the backward pass

    @cached_property
    def gathers(self) -> tuple[Conversion, ...]:
        return tuple(step.ahead for step in self.steps if step.ahead.kind == "all_gather")

    def without_memory(self, part: torch.Tensor) -> torch.Tensor:
        """The whole, for a part of which there is memory."""
        shape = part.shape
        for step in self.gathers:
            shape = step.shape(shape)
        whole = part.new_empty(shape)
        RESIZE_MEMORY(whole, 0)
        return whole


Unit = tuple[GatheredWeight, ...]  # the weights of one call of a block, in the order of its arguments


def gather(
    unit: Unit, parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], side: Side, count: Count
) -> Iterator[None]:
    """All weights of a unit, step by step; between launching and waiting others may compute. Wholes get their memory
    when they need it."""
    values = list(parts)
    for number in range(max(len(weight.gathers) for weight in unit)):
        steps = {i: weight.gathers[number] for i, weight in enumerate(unit) if number < len(weight.gathers)}
        lots: dict[Any, list[int]] = defaultdict(list)
        for i, step in steps.items():
            lots[step.axes, values[i].dtype].append(i)
        last = {i for i in steps if number == len(unit[i].gathers) - 1}
        lots_under_way = [
            _GatheredTogether(unit, {i: steps[i] for i in lot}, last, values, wholes) for lot in lots.values()
        ]
        works = [lot.start(axes, side, count) for (axes, _), lot in zip(lots, lots_under_way, strict=True)]
        yield
        for work in works:
            work.wait()
        for lot in lots_under_way:
            lot.arrived(count)


class _GatheredTogether:
    """Weights of a unit that are gathered together, one step of their way."""

    def __init__(
        self, unit: Unit, steps: Mapping[int, Conversion], last: Collection[int], values: list[torch.Tensor],
        wholes: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """`values`: how far all of the unit's weights are; `wholes`: for whom it is the last step."""
        self.unit, self.steps, self.last, self.values, self.wholes = unit, steps, last, values, wholes
        nbytes = {i: wholes[i].numel() * wholes[i].element_size() for i in steps if i in last and self._in_parts(i)}
        self.joined = joined(nbytes)
        self.alone = [i for i in steps if i not in self.joined]
        self.arriving: dict[int, torch.Tensor] = {}

    def _in_parts(self, i: int) -> bool:
        return self.steps[i].joint.lies_in_parts(self.values[i].shape)

    @cached_property
    def buffer(self) -> Joined:
        members = len(self.steps[self.joined[0]].joint.deal.members)
        return Joined(members, tuple(self.values[i].numel() for i in self.joined))

    def start(self, axes: Axes, side: Side, count: Count) -> Any:
        pieces = {i: self.steps[i].joint.pack_part(self.values[i]) for i in self.alone}
        for i, piece in pieces.items():
            numel = self.steps[i].joint.numel(self.values[i].shape)
            if i in self.last and self.steps[i].joint.arrives_whole(self.values[i].shape):
                RESIZE_MEMORY(self.wholes[i], numel * self.wholes[i].element_size())
                self.arriving[i] = self.wholes[i].as_strided((numel,), (1,))
            else:
                self.arriving[i] = piece.new_empty(numel)
            count.copied("forward", self.values[i], piece)
        arriving, sent = list(self.arriving.values()), list(pieces.values())
        if self.joined:
            sent.append(self.buffer.pack_parts([self.values[i].reshape(-1) for i in self.joined]))
            self.flat = sent[-1].new_empty(self.buffer.members * self.buffer.numel)
            arriving.append(self.flat)
            count.copies["forward"] += 1
        count.add("forward", "all_gather", axes, sum(x.numel() * x.element_size() for x in arriving))
        return side.gather(axes, arriving, sent, [self.unit[i].parameter for i in (*self.alone, *self.joined)])

    def arrived(self, count: Count) -> None:
        for i in self.alone:
            arrived, whole = self.arriving.pop(i), self.wholes[i] if i in self.last else None
            self.values[i] = _unpacked(self.steps[i], arrived, self.values[i].shape, whole)
            count.copied("forward", arrived, self.values[i])
        if self.joined:
            wholes = [self.wholes[i] for i in self.joined]
            for i, whole in zip(self.joined, wholes, strict=True):
                RESIZE_MEMORY(whole, whole.numel() * whole.element_size())
                self.values[i] = whole
            self.buffer.unpack_wholes(self.flat, wholes)
            del self.flat
            count.copies["forward"] += 1


def _unpacked(step: Conversion, arrived: torch.Tensor, shape: torch.Size, whole: torch.Tensor | None) -> torch.Tensor:
    """`shape`: of the part."""
    if whole is None or step.joint.arrives_whole(shape):
        return step.joint.unpack(arrived, shape) if whole is None else whole
    RESIZE_MEMORY(whole, whole.numel() * whole.element_size())
    return step.joint.unpack(arrived, shape, whole)
