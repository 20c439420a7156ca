"""What a plan needs of a device's memory, moment by moment.

Weights and the optimizer's state are always there. Activations pile up in the forward pass; in the backward pass
they go again, while gradients come. So each operator's turn in the backward pass is a *moment*: there is what
the copies before it have kept, the gradients of the copies after it, what its own copy holds (all activations,
also those that were not kept: they have been computed again by then), and its own working memory. The peak is
the largest of the moments. In inference nothing is kept, and a moment has an operator's tensors only.

A moment is a sum of tables: a limit on it is a linear constraint.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from tapas.cost.memory import CopiesAt
from tapas.problem.block_memory import KINDS, BlockMemory, CopyMemory
from tapas.problem.problem import Problem, Rows
from tapas.search import ChoiceRun, Choices, Load, Table, choice_runs, topology_of


@dataclass(frozen=True, slots=True)
class Moment:
    """The turn of an operator in the backward pass of a copy; of the optimizer, if there is no copy."""

    copy: int | None
    place: int = 0
    block: int | None = None  # it is as if a copy of this block took the turn of `copy`, which is one like it


@dataclass(frozen=True, slots=True)
class Peak:
    moment: Moment
    kinds: dict[str, int]  # bytes at that moment

    @property
    def nbytes(self) -> int:
        return sum(self.kinds.values())


class MemoryModel:
    """The memory of all plans of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        state = {size: problem.optimizer.state_bytes(size) for size in (1, 2, 4, 8, 16)}
        self.blocks = tuple(BlockMemory(part, state, problem.folded.training) for part in problem.blocks)
        self._known: dict[tuple, CopyMemory] = {}  # by block, choices and what is found around

    def peak(self, choices: Choices) -> Peak:
        """The largest moment of a plan."""
        return self._largest(choices, ())

    def needed(self, choices: Choices, families: Sequence[Sequence[int]]) -> Peak:
        """What a plan has to have room for: also if the most demanding of some copies that are alike had its turn
        when the first, or the last, of them has. So much need not be known about the order of copies; where they
        all do the same, it is the peak."""
        return self._largest(choices, families)

    def _largest(self, choices: Choices, families: Sequence[Sequence[int]]) -> Peak:
        found = [(run, self._copy(run)) for run in choice_runs(self.problem.wiring, choices)]
        always = {kind: sum(run.times * copy.always[kind] for run, copy in found) for kind in KINDS}
        others = self._others(found, families) if families else {}
        kept = dict.fromkeys(KINDS, 0.0)
        gradients = done = sum(run.times * copy.gradients for run, copy in found)
        largest, moment, kinds = done, Moment(None), {"gradients": done}
        for run, copy in found:
            last = run.first + run.times - 1
            # from copy to copy of a run there is always as much more, or less: the largest is the first or the last
            for number in sorted({run.first, last, *(n for n in others if run.first < n < last)}):
                before = number - run.first
                there = {kind: kept[kind] + before * copy.kept[kind] for kind in KINDS}
                there["gradients"] += gradients - (before + 1) * copy.gradients
                for turn, block in ((copy, None), *others.get(number, ())):
                    here = {kind: there[kind] + turn.at_worst[kind] for kind in KINDS}
                    if sum(here.values()) > largest:
                        largest, moment, kinds = sum(here.values()), Moment(number, turn.worst, block), here
            gradients -= run.times * copy.gradients
            for kind in KINDS:
                kept[kind] += run.times * copy.kept[kind]
        constants, unread = self.problem.besides
        always["constants"] += constants
        always["weights"] += unread
        return Peak(moment, {kind: round(always[kind] + kinds.get(kind, 0.0)) for kind in KINDS})

    def over_time(self, choices: Choices) -> list[tuple[str, int, dict[str, int]]]:
        """The phase, the copy that is at its turn, and the bytes by kind: for the first and the last copy of each run,
        as they change evenly in between. A copy that is done with its forward pass leaves what it keeps; one at its
        turn in the backward pass needs its largest moment. In inference there is but one turn."""
        found = [(run, self._copy(run)) for run in choice_runs(self.problem.wiring, choices)]
        constants, unread = self.problem.besides
        always = {kind: sum(run.times * copy.always[kind] for run, copy in found) for kind in KINDS}
        always["constants"] += constants
        always["weights"] += unread
        trained = self.problem.folded.training
        kept, gradients = dict.fromkeys(KINDS, 0.0), sum(run.times * copy.gradients for run, copy in found)
        forward: list[tuple[str, int, dict[str, int]]] = []
        backward: list[tuple[str, int, dict[str, int]]] = []

        def point(phase: str, copy: int, more: dict[str, float]) -> tuple[str, int, dict[str, int]]:
            return phase, copy, {kind: round(always[kind] + more.get(kind, 0.0)) for kind in KINDS}

        for run, copy in found:
            for before in sorted({0, run.times - 1}):
                there = {kind: kept[kind] + before * copy.kept[kind] for kind in KINDS}
                left = {kind: there[kind] + copy.kept[kind] for kind in KINDS}
                there["gradients"] += gradients - (before + 1) * copy.gradients
                turn = {kind: there[kind] + copy.at_worst[kind] for kind in KINDS}
                forward.append(point("forward", run.first + before, left if trained else turn))
                backward.append(point("backward", run.first + before, turn))
            gradients -= run.times * copy.gradients
            kept = {kind: kept[kind] + run.times * copy.kept[kind] for kind in KINDS}
        if not trained:
            return forward
        done = {"gradients": sum(run.times * copy.gradients for run, copy in found)}
        return [*forward, *reversed(backward), point("update", len(self.problem.folded.copies) - 1, done)]

    def _others(
        self, found: Sequence[tuple[ChoiceRun, CopyMemory]], families: Sequence[Sequence[int]]
    ) -> dict[int, list[tuple[CopyMemory, int]]]:
        """At whose turn another copy may have its own: how much that needs, and of which block it is."""
        copies = [(copy, run.block) for run, copy in found for _ in range(run.times)]
        others: dict[int, list[tuple[CopyMemory, int]]] = defaultdict(list)
        for family in families:
            most = max(family, key=lambda c: copies[c][0].most)
            for end in {family[0], family[-1]} - {most}:
                others[end].append(copies[most])
        return others

    def _copy(self, run: ChoiceRun) -> CopyMemory:
        key = run.block, run.own, run.ports
        if key not in self._known:
            self._known[key] = self.blocks[run.block].at((*run.own, *run.ports))
        return self._known[key]

    def load(self, moment: Moment, limit: float, rows: Rows, spare: float = 0.0) -> Load | None:
        """The limit at one moment, for the search; None where that cannot be said block by block, because a block
        has copies on both sides of it. Copies that may take another one's turn count by their mean, which is no
        more than the most demanding of them needs. Small tensors count as if they were stored whole, as long as that
        takes no more than what there is to spare."""
        wiring = topology_of(self.problem.wiring)
        when: dict[int, CopiesAt] = {}
        for block, first, times in wiring.copy_ranges:
            if moment.copy is None or first > moment.copy:
                here = CopiesAt(after=1)
            elif first + times <= moment.copy:
                here = CopiesAt(before=1)
            elif times > 1:
                return None
            else:
                here = CopiesAt(place=moment.place) if moment.block is None else CopiesAt(idle=1)
            if when.setdefault(block, here) != here:
                return None
        count = wiring.copy_counts
        tables = []
        for b, block in enumerate(self.blocks):
            left = self.problem.rows_of(b, rows)
            found = [*block.tables(when[b], left)]
            if b == moment.block:
                turn = block.tables(CopiesAt(place=moment.place), left, always=False)
                found += [replace(t, array=t.array / count[b]) for t in turn]
            tables.append(tuple(found))
        tables = _without_small(tables, [count[b] for b in range(len(tables))], spare)
        return Load(tuple(tables), limit - sum(self.problem.besides))


def _without_small(blocks: Sequence[Sequence[Table]], copies: Sequence[int], most: float) -> list[tuple[Table, ...]]:
    """Amounts that choices change by little, `most` in all, count as if they were as large as they can be."""
    spread = {(b, i): float(np.ptp(t.array)) * copies[b] for b, own in enumerate(blocks) for i, t in enumerate(own)}
    places = sorted(spread, key=lambda place: spread[place])
    small = set(compress(places, np.cumsum([spread[place] for place in places]) <= most))
    return [
        tuple(replace(t, array=np.full_like(t.array, t.array.max())) if (b, i) in small else t for i, t in own)
        for b, own in enumerate(map(enumerate, blocks))
    ]
