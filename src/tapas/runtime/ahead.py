"""Weights that are stored split, gathered ahead of time: those of a block together, while the block before computes.

After its forward pass a block's gathered weights are kept for the backward pass, or freed and gathered again for it:
the plan says which. What is freed is the memory only: operators that saved a weight, or a view of it, find it there
again. Backward passes go through the blocks from the last to the first; autograd runs what was called last first, so
when it comes to a block nothing of those after it is left to do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from tapas._torch import RESIZE_MEMORY, backward_number, in_backward, storages, when_backward_ends
from tapas.runtime.collectives import Count, Side
from tapas.runtime.gathered import Unit, gather
from tapas.runtime.side_groups import SideStream, UnderWay
from tapas.runtime.untraced import around_blocks, untraced


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

    @around_blocks
    def forward(self, weights: ForwardPass, number: int, *others: torch.Tensor) -> Any:
        wholes, leaves = weights.enter(number)
        arguments = list(others)
        for place, leaf in zip(self.places, leaves, strict=True):
            arguments.insert(place, leaf)
        del leaves
        results = self.block(*arguments)
        weights.leave(number, wholes, results)
        return results
