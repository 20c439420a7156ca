"""Optimal choices for a network of repeated blocks: tied, and free to differ from copy to copy.

Three answers come out: the best plan with all copies of a block alike (its cost is added up over
all copies), a lower bound for every plan whatsoever, and, where the bound is lower, the plan that
attains it.

In this order: choices that another one replaces are left out; what is easy is contracted away, once; the core that is
left is contracted with small tables, whose bound is mostly tight. If it is not, choices that no better plan can take
are ruled out, by min-marginals or, where these take too long, by dual bounds; then tables may be larger.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from tapas.search.contraction import WORK, TooMuchWork
from tapas.search.dead_ends import without_dead_ends
from tapas.search.dual_reduction import reduce_by_dual_bounds
from tapas.search.marginal_reduction import MarginalBounds, marginal_bounds
from tapas.search.monitor import Stopped, unwatched
from tapas.search.network import Domains, Network, cost_of, original_choices
from tapas.search.partial_contraction import contract_partially
from tapas.search.run_length import Choices
from tapas.search.tied import copies_alike, solve_tied, tie_to_most_common
from tapas.search.untied import solve_untied

BUDGETS = (60_000, 600_000, 6_000_000, 40_000_000)  # entries of the largest table
HARDEST = 4_000_000_000  # additions that contracting away what is easy may take
LITTLE = 100_000_000  # additions that take a fraction of a second
SMALLEST = 2_000  # budget of last resort: always fast enough, bounds may be loose
LARGE = 10_000  # entries of a table: those of three axes, of two with many options
PROMISING = 0.1  # of the gap: choices that raise the bound by no more
WORTHWHILE = 0.1  # a round that rules out a smaller part of the choices is the last
TOLERANCE = 1e-9  # relative: what rounding may do to sums of the same numbers


@dataclass(frozen=True)
class SearchAnswer:
    choices: Choices
    cost: float
    bound: float
    alike: bool  # all copies of a block choose the same

    @property
    def gap(self) -> float:
        return max(0.0, self.cost - self.bound)

    def widened(self, network: Network, left: Domains) -> "SearchAnswer":
        """The same plan among all choices of the network, of which these were left."""
        choices = original_choices(network, left, self.choices)
        return replace(self, choices=choices, cost=cost_of(network, choices))


Original = Callable[[Choices], Choices]  # a plan of a smaller network as one of the network it came from
Note = Callable[[float, float], None]  # is told what a search has come to: cost and bound


def solve(
    network: Network, budgets: Sequence[int] = BUDGETS, alike: bool = True, tolerance: float = TOLERANCE,
    note: Note = lambda cost, bound: None,
) -> SearchAnswer:  # fmt: skip
    """The best plan, but for the tolerance. Small tables are tried first: mostly their bound is already tight. Where
    alike copies are as good as differing ones, they are alike, if that is wanted. If it has to stop before there is
    any plan, it is thrown out.

    >>> from tapas.search import BlockCopy, BlockNetwork, table
    >>> block = BlockNetwork((2,), 1, (table((0,), np.array([3.0, 2.0])),))
    >>> solve(Network((block,), [BlockCopy(0, ()), BlockCopy(0, ())]))
    SearchAnswer(choices=((1,), (1,)), cost=4.0, bound=4.0, alike=True)
    """
    # where tables are small, looking for dead ends takes longer than contracting all of it
    large = max(t.array.size for block in network.blocks for t in block.tables) > LARGE
    nothing: Domains = {}
    fewer, left = without_dead_ends(network) if large else (network, nothing)
    search = _FreeSearch(fewer, alike, tolerance, note)
    try:
        search.run(budgets)
    except Stopped:
        if search.best is None:
            raise
    assert search.best is not None
    best = search.best if fewer is network else search.best.widened(network, left)
    return replace(best, bound=min(search.bound, best.cost))


def some_plan(network: Network) -> SearchAnswer:
    """A plan that is found with small tables only, whoever wants to stop.

    >>> from tapas.search import BlockCopy, BlockNetwork, table
    >>> some_plan(Network((BlockNetwork((2,), 1, (table((0,), np.array([3.0, 2.0])),)),), [BlockCopy(0, ())])).cost
    2.0
    """
    search = _FreeSearch(network, False, TOLERANCE, lambda cost, bound: None)
    with unwatched():
        search.climb(_Part(network, _as_it_is), SMALLEST, np.inf)
    assert search.best is not None
    return replace(search.best, bound=min(search.bound, search.best.cost))


def _as_it_is(choices: Choices) -> Choices:
    return choices


@dataclass(frozen=True)
class _Part:
    """What is left of a network, and the way back to it."""

    network: Network
    original: Original

    def smaller(self, network: Network, back: Original) -> "_Part":
        return _Part(network, lambda choices: self.original(back(choices)))

    @property
    def choices(self) -> int:
        return sum(sum(block.sizes[: block.own]) for block in self.network.blocks)


@dataclass
class _FreeSearch:
    network: Network
    alike: bool  # copies had better be
    tolerance: float  # relative
    note: Note
    best: SearchAnswer | None = None
    bound: float = -np.inf

    def run(self, budgets: Sequence[int]) -> None:
        """What is easy is contracted away, with larger and larger tables; then choices are ruled out by dual bounds,
        and what is left of the core is contracted again."""
        largest = max(t.array.size for block in self.network.blocks for t in block.tables)
        enough = max(largest, budgets[0])  # for a network of small treewidth
        part = _Part(self.network, _as_it_is)
        for budget in sorted({budgets[0], enough}):
            try:
                partly = contract_partially(part.network, budget, HARDEST)
            except TooMuchWork:
                break
            part = part.smaller(partly.core, partly.expanded)
            if self.climb(part, budget):
                break
        else:
            self.climb_reduced(part, budgets)
        if self.best is None:
            self.climb(_Part(self.network, _as_it_is), SMALLEST, np.inf)
        if self.alike and not self.satisfied:
            self.tie(enough)

    def climb_reduced(self, part: _Part, budgets: Sequence[int]) -> None:
        """With larger tables, if that is quickly tried; else with fewer choices and larger tables in turn."""
        if self.climb(part, budgets[min(1, len(budgets) - 1)], LITTLE):
            return
        for number, budget in enumerate(budgets):
            smaller = self.narrow(part, budget)
            if number == 0 and smaller is part:  # the core takes too long for min-marginals
                reduced = reduce_by_dual_bounds(part.network, self.best.cost if self.best else None)
                if reduced.choices is not None:
                    self.offer(part.original(reduced.choices))
                self.learn(reduced.bound)
                smaller = self.narrow(part.smaller(reduced.network, reduced.original), budget)
            part = smaller
            if self.done or self.climb(part, budget):
                return

    def narrow(self, part: _Part, budget: int) -> _Part:
        """Rule out choices by min-marginals, as long as that rules out many."""
        while not self.done:
            bounds = marginal_bounds(part.network, budget)
            if bounds is None:
                break
            self.learn(bounds.bound)
            self.guess(part, bounds, budget)
            reduced = bounds.below(self.cost)
            before, part = part, part.smaller(reduced.network, reduced.original)
            if part.choices > (1 - WORTHWHILE) * before.choices:
                break
        return part

    def guess(self, part: _Part, bounds: MarginalBounds, budget: int) -> None:
        """Look for a plan where there would be a good one: among the most promising choices."""
        promising = bounds.below(bounds.bound + PROMISING * (min(self.cost, 2 * bounds.bound) - bounds.bound))
        with suppress(TooMuchWork):
            self.offer(part.original(promising.original(solve_untied(promising.network, budget, WORK).choices)))

    def tie(self, budget: int) -> None:
        """Look for a plan whose copies are alike and that is as good, or better than the best so far."""
        assert self.best is not None
        self.offer(tie_to_most_common(self.network, self.best.choices))
        if not self.satisfied:
            with suppress(TooMuchWork):
                self.offer(solve_tied(self.network, budget, WORK))

    @property
    def cost(self) -> float:
        return np.inf if self.best is None else self.best.cost

    @property
    def done(self) -> bool:
        return self.best is not None and self.best.cost <= self.bound * (1 + self.tolerance)

    def climb(self, part: _Part, budget: int, limit: float = WORK) -> bool:
        """Contract, with tables of so many entries; whether no more can be found out. The part may lack choices that
        no plan better than the best one has: its bound is one as long as that is known."""
        try:
            untied = solve_untied(part.network, budget, limit)
            self.learn(untied.bound)
            self.offer(part.original(untied.choices))
            if not self.done:
                self.offer(part.original(tie_to_most_common(part.network, untied.choices)))
            if not self.done:
                self.offer(part.original(solve_tied(part.network, budget, limit)))
        except TooMuchWork:
            return False
        return untied.exact or self.done

    @property
    def satisfied(self) -> bool:
        return self.done and self.best is not None and (self.best.alike or not self.alike)

    def learn(self, bound: float) -> None:
        self.bound = max(self.bound, bound)
        self.note(self.cost, self.bound)

    def offer(self, choices: Choices) -> None:
        """A plan: the cheaper one is the best, of equally good ones the one whose copies are alike."""
        best, alike = self.best, copies_alike(self.network, choices)
        cost = cost_of(self.network, choices)
        nicer = best is not None and alike and not best.alike and cost <= best.cost * (1 + TOLERANCE)
        if best is None or nicer or cost < best.cost * (1 - TOLERANCE):
            self.best = SearchAnswer(choices, cost, -np.inf, alike)
        self.learn(self.bound)
