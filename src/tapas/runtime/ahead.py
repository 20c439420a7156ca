"""Weights that are stored split, gathered ahead of time: those of a block together, while the block before computes.

After its forward pass a block's gathered weights are kept for the backward pass, or freed and gathered again for it:
the plan says which. What is freed is the memory only: operators that saved a weight, or a view of it, find it there
again. Backward passes go through the blocks from the last to the first; autograd runs what was called last first, so
when it comes to a block nothing of those after it is left to do.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from tapas._torch import RESIZE_MEMORY, backward_number, in_backward, storages, when_backward_ends
from tapas.runtime.collectives import Count, Side
from tapas.runtime.moves import Step
from tapas.runtime.redistribute import Conversion
from tapas.runtime.side_groups import SideStream, UnderWay
from tapas.runtime.untraced import untraced


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
        pieces = {i: step.joint.pack_part(values[i]) for i, step in steps.items()}
        last = {i for i in steps if number == len(unit[i].gathers) - 1}
        arriving: dict[int, torch.Tensor] = {}
        for i, step in steps.items():
            numel = step.joint.numel(values[i].shape)
            if i in last and step.joint.arrives_whole(values[i].shape):
                RESIZE_MEMORY(wholes[i], numel * wholes[i].element_size())
                arriving[i] = wholes[i].as_strided((numel,), (1,))
            else:
                arriving[i] = pieces[i].new_empty(numel)
        for i, piece in pieces.items():
            count.copied("forward", values[i], piece)
        works = []
        for (axes, _), lot in lots.items():
            count.add("forward", "all_gather", axes, sum(arriving[i].numel() * arriving[i].element_size() for i in lot))
            of = [unit[i].parameter for i in lot]
            works.append(side.gather(axes, [arriving[i] for i in lot], [pieces[i] for i in lot], of))
        yield
        for work in works:
            work.wait()
        for i, step in steps.items():
            arrived = arriving.pop(i)
            values[i] = _unpacked(step, arrived, values[i].shape, wholes[i] if i in last else None)
            count.copied("forward", arrived, values[i])


def _unpacked(step: Conversion, arrived: torch.Tensor, shape: torch.Size, whole: torch.Tensor | None) -> torch.Tensor:
    """`shape`: of the part."""
    if whole is None or step.joint.arrives_whole(shape):
        return step.joint.unpack(arrived, shape) if whole is None else whole
    RESIZE_MEMORY(whole, whole.numel() * whole.element_size())
    return step.joint.unpack(arrived, shape, whole)


@dataclass
class Freed:
    """What of a unit's weights is gathered again."""

    unit: Unit
    parts: Callable[[], Sequence[torch.Tensor]]
    wholes: list[torch.Tensor]
    there: bool = False

    def free(self) -> None:
        self.there = False
        for whole in self.wholes:
            RESIZE_MEMORY(whole, 0)


class ForwardPass:
    """The gathered weights of one forward pass, and of the backward passes through what it made."""

    def __init__(
        self, units: Sequence[Unit], part: Callable[[str], torch.Tensor],
        leaf: Callable[[str, torch.Tensor], torch.Tensor], side: Side, stream: SideStream, count: Count,
    ) -> None:  # fmt: skip
        """`part`: this rank's part of a parameter; `leaf`: what autograd is to take for it, once it is gathered."""
        self.units, self.part, self.leaf = units, part, leaf
        self.side, self.stream, self.count = side, stream, count
        self.wholes: dict[int, list[torch.Tensor]] = {}
        self.under_way: dict[int, UnderWay] = {}
        self.freed: dict[int, Freed] = {}
        self.backward = -1  # the number of the backward pass that is under way

    @untraced
    def enter(self, number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The weights of a unit: as memory, and as autograd takes them."""
        self._start(number)
        if number + 1 < len(self.units):
            self._start(number + 1)
        self.under_way.pop(number).wait()
        wholes = self.wholes.pop(number)
        # .data: writing to the memory again is no change that autograd should complain of
        leaves = [self.leaf(w.parameter, whole.data) for w, whole in zip(self.units[number], wholes, strict=True)]
        return wholes, leaves

    def _start(self, number: int) -> None:
        if number not in self.under_way:
            unit = self.units[number]
            parts = [self.part(weight.parameter) for weight in unit]
            self.wholes[number] = [weight.without_memory(part) for weight, part in zip(unit, parts, strict=True)]
            work = gather(unit, parts, self.wholes[number], self.side, self.count)
            self.under_way[number] = self.stream.start(work)

    @untraced
    def leave(self, number: int, wholes: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Free what is not kept, unless somebody else goes on to use it. Without a backward pass, or within one that
        computes all of this again, nobody holds on to it anyway."""
        tracked = [result for result in results if result.requires_grad]
        if not tracked or in_backward():
            return
        shared = set(storages(results))
        pairs = [
            (weight, whole)
            for weight, whole, storage in zip(self.units[number], wholes, storages(wholes), strict=True)
            if weight.again and storage not in shared
        ]
        if pairs:
            unit = tuple(weight for weight, _ in pairs)
            freed = Freed(unit, lambda: [self.part(w.parameter) for w in unit], [whole for _, whole in pairs])
            freed.free()
            self.freed[number] = freed
            register_multi_grad_hook(tracked, lambda _: self._before_backward(number), mode="any")

    def _before_backward(self, number: int) -> None:
        if self.backward != backward_number():
            self.backward = backward_number()
            when_backward_ends(self._after_backward)
        for other, freed in self.freed.items():
            if other > number and freed.there:
                self._drop(other)
        self._gather_again(number)
        before = max((other for other in self.freed if other < number), default=None)
        if before is not None:
            self._gather_again(before)
        if number in self.under_way:
            self.under_way.pop(number).wait()

    def _gather_again(self, number: int) -> None:
        freed = self.freed[number]
        if not freed.there:
            freed.there = True
            work = gather(freed.unit, freed.parts(), freed.wholes, self.side, self.count)
            self.under_way[number] = self.stream.start(work)

    def _drop(self, number: int) -> None:
        if number in self.under_way:  # nobody came to use it
            self.under_way.pop(number).wait()
        self.freed[number].free()

    def _after_backward(self) -> None:
        self.backward = -1
        for number, freed in self.freed.items():
            if freed.there:
                self._drop(number)


class GatheredCall(nn.Module):
    """A block whose weights come from a ForwardPass."""

    def __init__(self, block: nn.Module, places: Sequence[int]) -> None:
        """`places`: of these weights among the block's arguments."""
        super().__init__()
        self.block, self.places = block, tuple(places)

    @torch.compiler.disable(recursive=False)  # the block is compiled, not what is around it
    def forward(self, weights: ForwardPass, number: int, *others: torch.Tensor) -> Any:
        wholes, leaves = weights.enter(number)
        arguments = list(others)
        for place, leaf in zip(self.places, leaves, strict=True):
            arguments.insert(place, leaf)
        del leaves
        results = self.block(*arguments)
        weights.leave(number, wholes, results)
        return results
