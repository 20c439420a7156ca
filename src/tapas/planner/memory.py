"""What a plan needs of a device's memory, moment by moment.

Weights and the optimizer's state are always there. Activations pile up in the forward pass; in the backward pass
they go again, while gradients come. So each operator's turn in the backward pass is a *moment*: there is what
the copies before it have kept, the gradients of the copies after it, what its own copy holds (all activations,
also those that were not kept: they have been computed again by then), and its own working memory. The peak is
the largest of the moments. In inference nothing is kept, and a moment has an operator's tensors only.

A moment is a sum of tables: a limit on it is a linear constraint.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tapas.cost.memory import CopiesAt
from tapas.problem.block_memory import KINDS, BlockMemory, CopyMemory
from tapas.problem.problem import Problem, Rows
from tapas.search import ChoiceRun, Choices, Load, Table, choice_runs, topology_of


@dataclass(frozen=True, slots=True)
class Moment:
    """The turn of an operator in the backward pass of a copy; of the optimizer, if there is no copy."""

    copy: int | None
    place: int = 0
    block: int | None = None  # a copy of this block, which is like `copy`, has its turn next to that one


@dataclass(frozen=True, slots=True)
class Peak:
    moment: Moment
    kinds: dict[str, int]  # bytes at that moment

    @property
    def nbytes(self) -> int:
        return sum(self.kinds.values())


MANY = 8  # copies that are alike: what one of them keeps is little beside the others


@dataclass(frozen=True, slots=True)
class _Guest:
    """A copy that may have its turn next to that of the first one of its family, or of the last one: of many copies the
    first has kept what it keeps, and the last one is done; of few the guest takes its place."""

    copy: CopyMemory
    block: int
    when: CopiesAt  # where that one is


class MemoryModel:
    """The memory of all plans of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        state = {size: problem.optimizer.state_bytes(size) for size in (1, 2, 4, 8, 16)}
        self.blocks = tuple(
            BlockMemory(part, state, problem.folded.training, problem.router.passes > 1) for part in problem.blocks
        )
        self._known: dict[tuple, CopyMemory] = {}  # by block, choices and what is found around

    def peak(self, choices: Choices) -> Peak:
        """The largest moment of a plan."""
        return max(self._moments(choices, ()), key=lambda peak: peak.nbytes)

    def needed(self, choices: Choices, families: Sequence[Sequence[int]]) -> Peak:
        """What a plan has to have room for: also if the most demanding of some copies that are alike had its turn
        next to the first, or the last, of them. So much need not be known about the order of copies; where they
        all do the same, it is the peak."""
        return max(self._moments(choices, families), key=lambda peak: peak.nbytes)

    def beyond(self, choices: Choices, families: Sequence[Sequence[int]], limit: float) -> list[Peak]:
        """All moments at which a plan needs more than that, the largest first."""
        peaks = [peak for peak in self._moments(choices, families) if peak.nbytes > limit]
        return sorted(peaks, key=lambda peak: -peak.nbytes)

    def _moments(self, choices: Choices, families: Sequence[Sequence[int]]) -> Iterator[Peak]:
        """The worst moment of each copy that may be the largest of all."""
        found = [(run, self._copy(run)) for run in choice_runs(self.problem.wiring, choices)]
        always = {kind: sum(run.times * copy.always[kind] for run, copy in found) for kind in KINDS}
        constants, unread = self.problem.besides
        always["constants"] += constants
        always["weights"] += unread

        def peak(moment: Moment, kinds: Mapping[str, float]) -> Peak:
            return Peak(moment, {kind: round(always[kind] + kinds.get(kind, 0.0)) for kind in KINDS})

        others = self._others(found, families) if families else {}
        kept = dict.fromkeys(KINDS, 0.0)
        gradients = sum(run.times * copy.gradients for run, copy in found)
        yield peak(Moment(None), {"gradients": gradients})
        for run, copy in found:
            last = run.first + run.times - 1
            # from copy to copy of a run there is always as much more, or less: the largest is the first or the last
            for number in sorted({run.first, last, *(n for n in others if run.first < n < last)}):
                before = number - run.first
                there = {kind: kept[kind] + before * copy.kept[kind] for kind in KINDS}
                there["gradients"] += gradients - (before + 1) * copy.gradients
                yield peak(Moment(number, copy.worst), _added(there, copy.at_worst))
                for guest in others.get(number, ()):
                    own = copy.kept if guest.when.before else {"gradients": guest.when.after * copy.gradients}
                    here = _added(_added(there, own), guest.copy.at_worst)
                    yield peak(Moment(number, guest.copy.worst, guest.block), here)
            gradients -= run.times * copy.gradients
            for kind in KINDS:
                kept[kind] += run.times * copy.kept[kind]

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
    ) -> dict[int, list["_Guest"]]:
        """Next to whose turn another copy may have its own."""
        copies = [(copy, run.block) for run, copy in found for _ in range(run.times)]
        others: dict[int, list[_Guest]] = defaultdict(list)
        for family in families:
            most = max(family, key=lambda c: copies[c][0].most)
            for end in {family[0], family[-1]} - {most}:
                others[end].append(_Guest(*copies[most], beside_guest(end, family)))
        return others

    def arranged(self, choices: Choices) -> Choices:
        """The same plan with copies that may change places in the order that needs least: those first that keep little
        and have large gradients, so that what is there is largest at one end or the other."""
        runs = choice_runs(self.problem.wiring, choices)
        ordered: list[ChoiceRun] = []
        for _, same in groupby(runs, key=self._place_in_chain):
            ordered += sorted(same, key=lambda run: sum(self._copy(run).kept.values()) - self._copy(run).gradients)
        return tuple([run.own for run in ordered for _ in range(run.times)])

    def _place_in_chain(self, run: ChoiceRun) -> tuple:
        """The same for copies that follow each other in a chain, and hand on what they are handed."""
        for number, chain in enumerate(topology_of(self.problem.wiring).chains):
            if chain.first <= run.first < chain.stop:
                loop = all(v is None or run.own[v] == port for v, port in zip(chain.feeds, run.ports, strict=True))
                return number, run.ports if loop else run.first
        return -1, run.first

    def _copy(self, run: ChoiceRun) -> CopyMemory:
        key = run.block, run.own, run.ports
        if key not in self._known:
            self._known[key] = self.blocks[run.block].at((*run.own, *run.ports))
        return self._known[key]

    def load(self, moment: Moment, limit: float, rows: Rows, family: Sequence[int] = ()) -> Load | None:
        """The limit at one moment, for the search; None where that cannot be said block by block, because a block
        has copies on both sides of it. `family` is the copies that may have their turn next to this one."""
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
                here = CopiesAt(place=moment.place)
                if moment.block is not None:
                    here = beside_guest(moment.copy, family)
            if when.setdefault(block, here) != here:
                return None
        left = [self.problem.rows_of(b, rows) for b in range(len(self.blocks))]
        tables = tuple([tuple(block.tables(when[b], left[b])) for b, block in enumerate(self.blocks)])
        turns: tuple[tuple[Table, ...], ...] = ()
        if moment.block is not None:
            kin = {self.problem.folded.copies[c].block for c in family}
            if wiring.copy_counts[moment.block] == 1:  # of a single copy the mean is all there is, so it says more
                kin = {moment.block}
            at = CopiesAt(place=moment.place)
            turns = tuple(
                [
                    tuple(block.tables(at, left[b], always=False)) if b in kin else ()
                    for b, block in enumerate(self.blocks)
                ]
            )
        return Load(tables, limit - sum(self.problem.besides), turns)


def _added(some: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    return {kind: some[kind] + others.get(kind, 0.0) for kind in KINDS}


def beside_guest(end: int, family: Sequence[int]) -> CopiesAt:
    """Where the first or the last of some copies is while another one has its turn next to it."""
    if len(family) < MANY:
        return CopiesAt(idle=1)
    return CopiesAt(before=1) if end == family[0] else CopiesAt(after=1)
