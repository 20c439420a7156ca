"""Gradients on their way from the backward pass to the parameters.

Nothing waits for them before the optimizer does, so what they have to send is sent while the backward pass
goes on computing, in process groups of their own and always in the same order. Of gradients that are not sent autograd
takes care by itself, as it does for the original: nothing is done for each of them before the backward pass ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from tapas._torch import in_backward, when_backward_ends
from tapas.errors import TapasError
from tapas.runtime.buckets import Bucket, Buckets
from tapas.runtime.collectives import Count, Side
from tapas.runtime.lent_memory import Memory
from tapas.runtime.moves import Step
from tapas.runtime.parameters import hand_over, part_of, stored_part
from tapas.runtime.scattered import scatter
from tapas.runtime.side_groups import SideStream, UnderWay


@dataclass
class Arriving:
    """Gradients of a unit's weights, which leave together."""

    members: set[int] = field(default_factory=set)  # whose gradients are expected, by the last forward pass
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Accumulation:
    """Whether backward passes send gradients, or keep them for one that does; common to all programs of a module."""

    sends: bool = True
    programs: list["Gradients"] = field(default_factory=list)

    def forget_all_but(self, used: Sequence["Gradients"]) -> None:
        """Programs that will not be run again; but not what they have yet to send."""
        self.programs = [program for program in self.programs if program in used or program.unsent]


class Gradients:
    def __init__(
        self, parameters: Sequence[torch.Tensor], trained: set[int], buckets: list[Bucket],
        units: Sequence[Mapping[int, Sequence[Step]]], side: Side, stream: SideStream, count: Count, memory: Memory,
        accumulation: Accumulation,
    ) -> None:  # fmt: skip
        """`units`: parameters that are gathered together, with the steps of that."""
        self.parameters, self.trained, self.packed = parameters, trained, Buckets(buckets, side, count, memory)
        self.side, self.stream, self.count = side, stream, count
        self.accumulation = accumulation
        accumulation.programs.append(self)
        self.steps = {index: steps for unit in units for index, steps in unit.items()}
        self.units = [Arriving() for _ in units]
        self.arriving = {index: arriving for unit, arriving in zip(units, self.units, strict=True) for index in unit}
        self.sent = self.arriving.keys() | self.packed.home.keys()  # of others, this rank needs nothing but its own
        self.unsent: dict[int, torch.Tensor] = {}  # of backward passes that did not send
        self.made: dict[int, torch.Tensor] = {}  # this rank's gradients, summed as far as they have to be
        self.scattered: tuple[UnderWay, dict[int, torch.Tensor]] | None = None  # those of one unit
        self.waiting = False  # for the end of a backward pass
        # parts of parameters, and as autograd takes them
        self.leaves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def enter(self) -> None:
        """Before a forward pass."""
        if self.waiting and not in_backward():
            self._reset()  # the last backward pass failed half-way

    def leaf(self, index: int, value: torch.Tensor | None = None) -> torch.Tensor:
        """A parameter for one forward pass: this rank's part of it, or what was gathered."""
        parameter = self.parameters[index]
        wanted = index in self.trained and parameter.requires_grad and torch.is_grad_enabled()
        if value is None:
            return self._stored_leaf(index) if wanted else stored_part(parameter)
        if index in self.arriving:
            (self.arriving[index].members.add if wanted else self.arriving[index].members.discard)(index)
        if wanted:
            self._hook(index, value.requires_grad_())
        return value

    def _stored_leaf(self, index: int) -> torch.Tensor:
        """That of the last forward pass if it still is the parameter's memory: to set a hook takes longer."""
        part = part_of(self.parameters[index])
        before, leaf = self.leaves.get(index, (None, None))
        if leaf is None or before is not part or leaf.data_ptr() != part.data_ptr():
            if leaf is not None and index not in self.sent:
                self._hook(index, leaf)  # there may be a backward pass to come through it
            leaf = part.detach().requires_grad_()
            if index in self.sent:
                self._hook(index, leaf)
            self.leaves[index] = part, leaf
        return leaf

    def begin(self) -> None:
        """A backward pass comes to what a forward pass returned."""
        if torch.is_grad_enabled():
            raise TapasError("backward", "create_graph=True", "gradients of gradients are not supported")
        if not self.waiting:
            self.waiting = True
            when_backward_ends(self._finish)

    def _hook(self, index: int, leaf: torch.Tensor) -> None:
        leaf.register_post_accumulate_grad_hook(partial(self._arrived, index))

    def _arrived(self, index: int, leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        (self._take if index in self.sent else self._keep)(index, gradient)

    def _take(self, index: int, gradient: torch.Tensor) -> None:
        """A gradient as the program made it, which is to be sent."""
        if index in self.unsent:
            gradient = self.unsent.pop(index).add_(gradient)
        if not self.accumulation.sends:
            self.unsent[index] = gradient
            return
        if index not in self.arriving:
            self._pass_on(index, gradient)
            return
        arriving = self.arriving[index]
        before = arriving.gradients.get(index)
        arriving.gradients[index] = gradient if before is None else before + gradient
        if arriving.gradients.keys() >= arriving.members:
            self._scatter(arriving)

    def _pass_on(self, index: int, gradient: torch.Tensor) -> None:
        """A gradient of this rank's part of a parameter."""
        (self.packed.add if index in self.packed else self._keep)(index, gradient)

    def _scatter(self, arriving: Arriving) -> None:
        """Weights that are stored in pieces: sum their gradients and keep this rank's pieces. Those of the unit before
        have had the time of one to get through."""
        self._collect()
        values, arriving.gradients = arriving.gradients, {}
        work = scatter(self.steps, values, self.side, self.count)
        self.scattered = self.stream.start(work, list(values.values())), values

    def _collect(self) -> None:
        if self.scattered is None:
            return
        (under_way, values), self.scattered = self.scattered, None
        under_way.wait()
        for index, part in values.items():
            self._pass_on(index, part)

    def _keep(self, index: int, gradient: torch.Tensor) -> None:
        self.made[index] = self.made[index] + gradient if index in self.made else gradient

    def _finish(self) -> None:
        """At the end of a backward pass."""
        if self.accumulation.sends:
            for other in self.accumulation.programs:
                if other is not self:
                    other._finish_own()
        self._finish_own()

    def _finish_own(self) -> None:
        try:
            with torch.no_grad():
                if self.accumulation.sends:
                    for index in sorted(self.unsent):  # those that took no part in this pass
                        self._take(index, torch.zeros_like(self.unsent[index]))
                for arriving in self.units:
                    if arriving.gradients:
                        self._scatter(arriving)
                self._collect()
                self.packed.send(all_of_them=True)
                for index, gradient in self.packed.sums():
                    self._keep(index, gradient)
                for index, gradient in self.made.items():
                    hand_over(self.parameters[index], gradient)
                for index, (_, leaf) in self.leaves.items():
                    if (gradient := leaf.grad) is not None:
                        hand_over(self.parameters[index], gradient)
        finally:
            self._reset()

    def _reset(self) -> None:
        self.scattered, self.made, self.waiting = None, {}, False
        self.packed.reset()
        for arriving in self.units:
            arriving.gradients = {}
        for _, leaf in self.leaves.values():
            leaf.grad = None
