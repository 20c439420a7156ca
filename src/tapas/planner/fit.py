"""The fastest plan that fits into memory.

A plan fits if it does so at every moment (see memory.py). Few moments ever matter, so the search starts with the
one at which the fastest plan needs most, and goes on as long as what it finds needs too much at another one. Any
of the moments alone already gives a bound for all plans that fit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from tapas.errors import PlanError
from tapas.ir.fold import Folded, split_copies
from tapas.planner.assignment import assignment_of, choices_of
from tapas.planner.memory import MemoryModel, Moment, Peak
from tapas.planner.solution import Solution
from tapas.problem.build import build_problem
from tapas.problem.problem import Problem, Rows
from tapas.problem.restrictions import Constraints
from tapas.search import (
    WORK,
    Choices,
    Engine,
    EvaluatedChoices,
    Load,
    Network,
    Overrun,
    SearchAnswer,
    SearchProblem,
    Stopped,
    copies_alike,
    cost_of,
    count_choices,
    current_monitor,
    least_largest_load,
    solve_within,
    some_plan,
)

LARGE = 60_000  # entries of a table: three axes with all options have more
FEW = 1  # searches at prices, where each takes ten seconds


ENGINE: Engine = solve_within


class DoesNotFit(PlanError):
    """No plan fits; with the least that any is known to need, and the least that any can need."""

    def __init__(self, limit: float, peak: Peak, bound: float) -> None:
        self.limit, self.peak, self.bound = limit, peak, bound
        self.stopped = stopped() and bound <= limit  # or more time would not help
        found = "fits" if bound > limit else "was found that fits"
        least = f"the smallest needs {peak.nbytes / 1e9:.4g} GB"
        remedy = "use more devices, or a smaller batch (--batch)"
        if self.stopped:
            known = f", and none needs less than {bound / 1e9:.4g} GB" if bound > 0 else ""
            found, least = "was found in time that fits", f"the smallest so far needs {peak.nbytes / 1e9:.4g} GB{known}"
            remedy = f"give it more time (--time-limit), {remedy}"
        super().__init__("memory", f"no plan {found} into {limit / 1e9:.4g} GB per device: {least}", remedy)


def stopped() -> bool:
    """Whether the search has been told to end."""
    monitor = current_monitor()
    return monitor is not None and monitor.stopped


def search(problem: Problem, rows: Rows | None = None, shown: bool = True) -> Solution:
    """The best choices among those that are left, however much memory that takes. Some are always found, however
    little time there is."""
    left = problem.rows(rows)
    network = problem.network(left)
    found = ENGINE(SearchProblem(network, shown=shown))
    answer = found.answer or some_plan(network)
    if answer.cost == float("inf"):
        raise PlanError("search", "no combination of the choices that are left works", "loosen the pins")
    return Solution(problem, replace(answer, choices=problem.widened(answer.choices, left)))


Further = Callable[[Problem, Rows], Rows]  # leaves fewer choices of a problem


def _all_of_them(problem: Problem, rows: Rows) -> Rows:
    return rows


@dataclass(frozen=True)
class LimitedProblem:
    """A problem and what limits its plans: memory, and the choices that a user leaves."""

    problem: Problem
    rows: Rows
    limit: float | None
    constraints: Constraints = field(default_factory=Constraints)
    start: "WarmStart | None" = None  # a good plan
    guess: Callable[[], "WarmStart | None"] = lambda: None  # finds one, where the best plan takes long to find
    learnt: dict[Moment, float] = field(default_factory=dict, compare=False)  # what a byte is worth to the best plan

    @cached_property
    def ends(self) -> tuple[Problem, Rows]:
        """The same problem, posed so that moments can be told apart."""
        problem = build_problem(with_ends(self.problem.folded), self.problem.router, self.problem.optimizer)
        return problem, self.constraints.rows(problem)

    def fitting(self, further: Further = _all_of_them, work: int = WORK) -> "LimitedSearch":
        """The search among some of the choices. Where others have been searched, it starts at their prices."""
        problem, rows = self.ends
        prices = {} if further is _all_of_them else dict(self.learnt)
        return LimitedSearch(problem, further(problem, rows), families(self.problem.folded), work, prices=prices)

    def fits(self, solution: Solution) -> bool:
        return self.limit is None or solution.peak.nbytes <= self.limit

    def best(self, further: Further = _all_of_them, insist: bool = True) -> Solution:
        """The best solution that fits; if there is none, that is an error, or (if one does not insist) the
        best one that does not."""
        fastest = search(self.problem, further(self.problem, self.rows), shown=self.limit is None)
        if self.limit is None or self.fits(fastest):
            return fastest
        fitting, moment = self.fitting(further), fastest.peak.moment
        start = None
        if further is _all_of_them:
            start = self.start or (self.guessed() if fitting.large else None)
        started = start is not None and fitting.begin(start, self.limit, moment)
        try:
            near = started and fitting.large
            fitted = fitting.near(self.limit, moment) if near else fitting.within(self.limit, moment)
        except DoesNotFit:
            if insist:
                raise
            return fastest
        if further is _all_of_them:
            self.learnt.update(fitting.prices)
        bound = min(fitted.cost, max(fitted.bound, fastest.answer.bound))  # what fits is one of all plans
        return Solution(self.problem, replace(fitted, bound=bound))  # both problems have the same copies and choices

    def guessed(self) -> "WarmStart | None":
        try:
            return self.guess()
        except Stopped:
            return None

    def smallest(self) -> Peak:
        """The least memory that a plan is known to need."""
        return self.fitting().smallest[0]


def families(folded: Folded) -> list[list[int]]:
    """Copies that are alike, wherever there are several."""
    return [copies for b in range(len(folded.blocks)) if len(copies := folded.copies_of(b)) > 1]


def with_ends(folded: Folded) -> Folded:
    """The first and the last copy of every block as blocks of their own: that is where memory peaks."""
    ends: set[str] = set()
    for block in range(len(folded.blocks)):
        copies = [c for c in folded.copies_of(block) if folded.copies[c].path]
        ends |= {folded.copies[c].path for c in (copies[0], copies[-1])} if len(copies) > 1 else set()
    return split_copies(folded, sorted(pattern for path in ends for pattern in (path, f"{path}.*")))


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A plan that fits, of the same graph, maybe of a problem with fewer options; and what a byte of memory is worth
    there."""

    problem: Problem
    choices: Choices
    price: float


@dataclass
class LimitedSearch:
    """The search for plans of one problem within limits; what one search finds out helps the next."""

    problem: Problem
    rows: Rows
    families: Sequence[Sequence[int]]  # copies that are alike
    work: int = WORK  # that a search may do, see solve_within
    evaluated: dict[Choices, EvaluatedChoices] = field(default_factory=dict)
    prices: dict[Moment, float] = field(default_factory=dict)

    @cached_property
    def memory(self) -> MemoryModel:
        return MemoryModel(self.problem)

    @cached_property
    def network(self) -> Network:
        return self.problem.network(self.rows)

    def add(self, choices: Choices) -> None:
        """A plan that is known from elsewhere."""
        self.evaluated.setdefault(choices, EvaluatedChoices(choices, 0.0, ()))

    def narrowed(self, choices: Choices) -> Choices:
        """Choice numbers of the full tables as those of the restricted ones."""
        rows = self.rows
        return self.problem.renumbered(
            choices, lambda b, v, i: int(np.searchsorted(rows[b, v], i)) if (b, v) in rows else i
        )

    def allowed(self, choices: Choices) -> bool:
        """Whether the restrictions leave these choices of the full tables."""
        different = count_choices(self.problem.wiring, choices)
        return all(i in self.rows.get((b, v), (i,)) for b, own in different for v, i in enumerate(own))

    def needed(self, choices: Choices) -> Peak:
        return self.memory.needed(self.problem.widened(choices, self.rows), self.families)

    def arranged(self, choices: Choices) -> Choices:
        return self.narrowed(self.memory.arranged(self.problem.widened(choices, self.rows)))

    @cached_property
    def smallest(self) -> tuple[Peak, float]:
        """The least memory that a plan is known to need, and the least that any can need."""
        loads = {Moment(None): self.load(Moment(None), 0.0)}
        besides = sum(self.problem.besides)

        def largest(choices: Choices) -> tuple[float, Load | None]:
            peak = self.needed(choices)
            if peak.moment not in loads:
                loads[peak.moment] = self.load(peak.moment, 0.0)
            return peak.nbytes - besides, loads[peak.moment]

        first = loads[Moment(None)]
        assert first is not None
        least = least_largest_load(self.network, first, largest, self.arranged)
        if not least.choices and least.bound == float("inf"):
            raise PlanError("search", "no combination of the choices that are left works", "loosen the pins")
        for choices in least.choices or self.any_choices():
            self.add(choices)
        peak = min(map(self.needed, least.choices or self.evaluated), key=lambda peak: peak.nbytes)
        return peak, min(least.bound + besides, peak.nbytes)

    def any_choices(self) -> list[Choices]:
        """Where there was no time to find others."""
        if self.evaluated:
            return []
        return [some_plan(self.network).choices]

    @property
    def large(self) -> bool:
        """Whether the exact search takes minutes."""
        return max(t.array.size for block in self.network.blocks for t in block.tables) > LARGE

    def begin(self, start: WarmStart, limit: float, first: Moment) -> bool:
        """Begin with a plan that fits, if it is one of this problem's."""
        planned = assignment_of(Solution(start.problem, SearchAnswer(start.choices, 0.0, 0.0, False)))
        full = choices_of(self.problem, planned)
        choices = None if full is None or not self.allowed(full) else self.narrowed(full)
        if choices is None or cost_of(self.network, choices) == float("inf") or self.needed(choices).nbytes > limit:
            return False
        self.add(choices)
        self.prices[first] = start.price
        return True

    def load(self, moment: Moment, limit: float) -> Load | None:
        """A limit at one moment."""
        blocks = self.problem.folded.copies
        family = next((f for f in self.families if moment.block in {blocks[c].block for c in f}), ())
        return self.memory.load(moment, limit, self.rows, family)

    def near(self, limit: float, first: Moment) -> SearchAnswer:
        """The best plan known that fits, and how far from the best one it can be: that takes few searches only."""
        return self.fastest_evaluated(limit, self.bound(limit, first, solves=FEW, work=0))

    def within(self, limit: float, first: Moment) -> SearchAnswer:
        """The fastest plan within a limit; `first` is a moment at which fast plans need much."""
        bound = self.bound(limit, first)
        if not self.plans_within(limit) and self.smallest[0].nbytes <= limit:
            bound = self.bound(limit, first)  # once more, with that one to start from
        return self.fastest_evaluated(limit, bound)

    def bound(self, limit: float, first: Moment, solves: int | None = None, work: int | None = None) -> float:
        """What plans within a limit cost at least; those that the search for it meets are remembered."""
        moments = dict.fromkeys([first, *(moment for moment, price in self.prices.items() if price > 0)])
        loads = {moment: load for moment in moments if (load := self.load(moment, limit)) is not None}

        def referee(choices: Choices) -> Overrun | None:
            beyond = self.memory.beyond(self.problem.widened(choices, self.rows), self.families, limit)
            for moment in [peak.moment for peak in beyond if peak.moment not in loads]:
                load = self.load(moment, limit)
                if load is not None:
                    loads[moment] = load
                    return Overrun(beyond[0].nbytes - limit, load)
            return Overrun(beyond[0].nbytes - limit, None) if beyond else None

        prices = [self.prices.get(moment, 0.0) for moment in loads]
        found = ENGINE(
            SearchProblem(
                self.network, tuple(loads.values()), referee, self.arranged, prices, tuple(self.evaluated.values()),
                solves, work=self.work if work is None else work,
            )
        )  # fmt: skip
        self.prices |= dict(zip(loads, found.prices, strict=True))
        self.evaluated |= {plan.choices: plan for plan in found.evaluated}
        return found.answer.bound if found.answer else 0.0

    def fastest_evaluated(self, limit: float, bound: float) -> SearchAnswer:
        """The fastest of the plans met so far that fit."""
        cost, choices = min(self.plans_within(limit), default=(float("inf"), ()))
        if cost == float("inf"):
            raise DoesNotFit(limit, *self.smallest)
        whole = self.problem.widened(choices, self.rows)
        return SearchAnswer(whole, cost, min(bound, cost), copies_alike(self.network, choices))

    def plans_within(self, limit: float) -> list[tuple[float, Choices]]:
        """The plans met so far that fit, with their costs."""
        return [(cost_of(self.network, c), c) for c in self.evaluated if self.needed(c).nbytes <= limit]
