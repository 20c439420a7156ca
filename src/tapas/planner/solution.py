"""A search's answer, read back: what each operator does, what moves, how long and how much memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from tapas.planner.memory import MemoryModel, Peak
from tapas.problem.problem import BlockProblem, Edge, OpVariable, Problem, TensorVariable, Variable, WeightVariable
from tapas.rules.base import repeated
from tapas.search import SearchAnswer, choice_runs
from tapas.sharding.routing import RouteStep


@dataclass(frozen=True)
class Group:
    """Copies of a block that choose the same and find the same around them."""

    block: int
    copies: tuple[int, ...]
    choices: tuple[int, ...]  # of own variables, then of ports


@dataclass(frozen=True)
class Transfer:
    """A tensor that changes its layout between two variables of a block."""

    edge: Edge
    source: int  # layout numbers in the edge's space
    target: int
    moves: tuple[RouteStep, ...]
    hidden_seconds: float  # traffic of weights and their gradients behind what is computed
    seconds: float  # what the step really waits for
    again: bool  # the forward part takes place a second time, in the backward pass


@dataclass(frozen=True)
class Solution:
    problem: Problem
    answer: SearchAnswer

    @cached_property
    def _groups(self) -> list[Group]:
        found: dict[tuple, list[range]] = {}
        for run in choice_runs(self.problem.wiring, self.answer.choices):
            copies = range(run.first, run.first + run.times)
            found.setdefault((run.block, (*run.own, *run.ports)), []).append(copies)
        return [Group(block, tuple(chain(*copies)), values) for (block, values), copies in found.items()]

    def groups(self) -> list[Group]:
        return self._groups

    def part(self, group: Group) -> BlockProblem:
        return self.problem.blocks[group.block]

    def mode(self, group: Group) -> str:
        return self.part(group).mode_of(group.choices)

    def transfers(self, group: Group) -> Iterator[Transfer]:
        part, mode = self.part(group), self.mode(group)
        for edge in part.edges:
            i, j = group.choices[edge.source], group.choices[edge.target]
            source, target = int(edge.source_layouts[i]), int(edge.target_layouts[j])
            if source == target:
                continue
            moves = tuple(edge.space.route(source, target))
            ends = np.array([i]), np.array([j])
            waited, sent = float(edge.costs(*ends)[0, 0]), float(edge.space.seconds[source, target])
            again = part.again_seconds(edge, mode, *ends)
            if again is not None:
                waited += float(again[0, 0])
                sent += float(edge.space.forward_seconds[source, target])
            yield Transfer(edge, source, target, moves, max(0.0, sent - waited), waited, again is not None)

    def seconds(self) -> dict[str, float]:
        """Seconds per step by kind; they add up to the cost."""
        kinds = ("forward", "backward", "again", "update", "communication", "hidden")
        total: dict[str, float] = dict.fromkeys(kinds, 0.0)
        for group in self.groups():
            times, mode = len(group.copies), self.mode(group)
            for variable, choice in zip(self.part(group).variables, group.choices, strict=False):
                if isinstance(variable, OpVariable):
                    total["forward"] += times * float(variable.table.forward_seconds[choice])
                    total["backward"] += times * float(variable.table.backward_seconds[choice])
                    total["communication"] += times * float(variable.table.kernel_seconds[choice])
                    total["hidden"] += times * float(variable.table.hidden_seconds[choice])
                    if repeated(mode, variable.rule):
                        total["again"] += times * float(variable.table.again_seconds[choice])
                elif isinstance(variable, WeightVariable):
                    total["update"] += times * float(variable.seconds[choice])
            for transfer in self.transfers(group):
                total["communication"] += times * transfer.seconds
                total["hidden"] += times * transfer.hidden_seconds
        return total

    @cached_property
    def peak(self) -> Peak:
        return MemoryModel(self.problem).peak(self.answer.choices)

    def memory(self) -> dict[str, int]:
        """Bytes per device by kind, at the most loaded device, when it needs most."""
        return dict(self.peak.kinds)

    def memory_over_time(self) -> list[tuple[str, int, dict[str, int]]]:
        """Phase, copy and bytes by kind, see MemoryPoint."""
        return MemoryModel(self.problem).over_time(self.answer.choices)


def layout_of(variable: Variable, choice: int):
    """The layout a weight is stored in, or in which a tensor is found by its readers."""
    if isinstance(variable, WeightVariable):
        return variable.space.layout(int(variable.stored[choice]))
    assert isinstance(variable, TensorVariable)
    return variable.space.layout(int(variable.allowed[choice]))
