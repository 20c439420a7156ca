"""Optimal choices for a network of repeated blocks: tied, and free to differ from copy to copy.

Three answers come out: the best plan with all copies of a block alike (its cost is added up over
all copies), a lower bound for every plan whatsoever, and, where the bound is lower, the plan that
attains it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapas.search.contraction import WORK, TooMuchWork
from tapas.search.dead_ends import without_dead_ends
from tapas.search.dual_reduction import reduce_by_dual_bounds
from tapas.search.monitor import Stopped, unwatched
from tapas.search.network import Domains, Network, cost_of, original_choices
from tapas.search.partial_contraction import PartialContraction, contract_partially
from tapas.search.run_length import Choices
from tapas.search.tied import copies_alike, solve_tied, tie_to_most_common
from tapas.search.untied import solve_untied

BUDGETS = (60_000, 600_000, 6_000_000, 40_000_000)  # entries of the largest table
HARDEST = 4_000_000_000  # additions that contracting away what is easy may take
SMALLEST = 2_000  # budget of last resort: always fast enough, bounds may be loose
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
    fewer, left = without_dead_ends(network)
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
        search.climb(network, [SMALLEST], _as_it_is, np.inf)
    assert search.best is not None
    return replace(search.best, bound=min(search.bound, search.best.cost))


def _as_it_is(choices: Choices) -> Choices:
    return choices


def _composed(outer: Original, inner: Original) -> Original:
    return lambda choices: outer(inner(choices))


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
        core, original = self.network, _as_it_is
        partly: list[PartialContraction] = []
        for budget in sorted({budgets[0], enough}):
            try:
                partly.append(contract_partially(core, budget, HARDEST))
            except TooMuchWork:
                break
            core, original = partly[-1].core, _composed(original, partly[-1].expanded)
            self.climb(core, [budget], original)
            if self.done:
                break
        if not self.done:
            self.climb_reduced(core, budgets, partly, original)
        if self.best is None:
            self.climb(self.network, [SMALLEST], _as_it_is, np.inf)
        if not self.satisfied:
            self.tie(enough)

    def climb_reduced(
        self, core: Network, budgets: Sequence[int], partly: Sequence[PartialContraction], original: Original
    ) -> None:
        incumbent = self.best.choices if self.best else None
        for contraction in partly:
            incumbent = incumbent and contraction.projected(incumbent)
        reduced = reduce_by_dual_bounds(core, incumbent)
        if reduced.choices is not None:
            self.offer(original(reduced.choices))
        self.learn(reduced.bound)
        if not self.done:
            self.climb(reduced.network, budgets, _composed(original, reduced.original))

    def tie(self, budget: int) -> None:
        """Look for a plan whose copies are alike and that is as good, or better than the best so far."""
        assert self.best is not None
        self.offer(tie_to_most_common(self.network, self.best.choices))
        if not self.satisfied:
            try:
                self.offer(solve_tied(self.network, budget, WORK))
            except TooMuchWork:
                pass

    @property
    def done(self) -> bool:
        return self.best is not None and self.best.cost <= self.bound * (1 + self.tolerance)

    def climb(self, network: Network, budgets: Sequence[int], original: Original, limit: float = WORK) -> None:
        """Contract with larger and larger tables, until it is exact or takes too long. The network may lack choices
        that no plan better than the best one has: its bound is one as long as that is known."""
        for budget in budgets:
            try:
                untied = solve_untied(network, budget, limit)
                self.learn(untied.bound)
                self.offer(original(untied.choices))
                if not self.done:
                    self.offer(original(tie_to_most_common(network, untied.choices)))
                if not self.done:
                    self.offer(original(solve_tied(network, budget, limit)))
            except TooMuchWork:
                continue
            if untied.exact or self.done:
                break

    @property
    def satisfied(self) -> bool:
        return self.done and self.best is not None and (self.best.alike or not self.alike)

    def learn(self, bound: float) -> None:
        self.bound = max(self.bound, bound)
        self.note(np.inf if self.best is None else self.best.cost, self.bound)

    def offer(self, choices: Choices) -> None:
        """A plan: the cheaper one is the best, of equally good ones the one whose copies are alike."""
        best, alike = self.best, copies_alike(self.network, choices)
        cost = cost_of(self.network, choices)
        nicer = best is not None and alike and not best.alike and cost <= best.cost * (1 + TOLERANCE)
        if best is None or nicer or cost < best.cost * (1 - TOLERANCE):
            self.best = SearchAnswer(choices, cost, -np.inf, alike)
        self.learn(self.bound)
