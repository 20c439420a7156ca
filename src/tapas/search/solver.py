"""Optimal choices for a network of repeated blocks: tied, and free to differ from copy to copy.

Three answers come out: the best plan with all copies of a block alike (its cost is added up over
all copies), a lower bound for every plan whatsoever, and, where the bound is lower, the plan that
attains it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tapas.search.contraction import WORK, TooMuchWork
from tapas.search.dual_reduction import reduce_by_dual_bounds
from tapas.search.network import Network, cost_of
from tapas.search.run_length import Choices
from tapas.search.tied import copies_alike, solve_tied, tie_to_most_common
from tapas.search.untied import solve_untied

BUDGETS = (60_000, 600_000, 6_000_000, 40_000_000)  # entries of the largest table
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


def solve(network: Network, budgets: Sequence[int] = BUDGETS, alike: bool = True) -> SearchAnswer:
    """The best plan. Small tables are tried first: mostly their bound is already tight. Where alike
    copies are as good as differing ones, they are alike, if that is wanted.

    >>> from tapas.search import BlockCopy, BlockNetwork, table
    >>> block = BlockNetwork((2,), 1, (table((0,), np.array([3.0, 2.0])),))
    >>> solve(Network((block,), [BlockCopy(0, ()), BlockCopy(0, ())]))
    SearchAnswer(choices=((1,), (1,)), cost=4.0, bound=4.0, alike=True)
    """
    largest = max(t.array.size for block in network.blocks for t in block.tables)
    enough = max(largest, budgets[0])  # for a network of small treewidth
    best, bound = _climb(network, sorted({budgets[0], enough}), alike=alike)
    if best is None or not _reaches(best.cost, bound):
        reduced = reduce_by_dual_bounds(network, best.choices if best else None)
        if reduced.choices is not None:
            best = _better(network, best, reduced.choices)
        start = max(bound, reduced.bound)
        within, bound = _climb(reduced.network, sorted({*budgets, enough}), start, alike=alike)
        if within is not None:
            best = _better(network, best, reduced.original(within.choices))
    if best is None:
        best, bound = _climb(network, [SMALLEST], bound, np.inf)
        assert best is not None
    return SearchAnswer(best.choices, best.cost, min(bound, best.cost), best.alike)


def _reaches(cost: float, bound: float) -> bool:
    return cost <= bound * (1 + TOLERANCE)


def _climb(
    network: Network, budgets: Sequence[int], bound: float = -np.inf, limit: float = WORK, alike: bool = True
) -> tuple[SearchAnswer | None, float]:
    """Contract with larger and larger tables, until it is exact or takes too long."""
    best: SearchAnswer | None = None
    for budget in budgets:
        try:
            untied = solve_untied(network, budget, limit)
            bound = max(bound, untied.bound)
            attempts: tuple[Callable[[], Choices], ...] = (
                lambda untied=untied: untied.choices,
                lambda untied=untied: tie_to_most_common(network, untied.choices),
                lambda budget=budget: solve_tied(network, budget, limit),
            )
            for attempt in attempts:
                if best is None or (alike and not best.alike) or not _reaches(best.cost, bound):
                    best = _better(network, best, attempt())
        except TooMuchWork:
            continue
        if untied.exact or (best is not None and _reaches(best.cost, bound)):
            break
    return best, bound


def _better(network: Network, best: SearchAnswer | None, choices: Choices) -> SearchAnswer:
    """The cheaper of two answers; of equally good ones the one whose copies are alike."""
    other = SearchAnswer(choices, cost_of(network, choices), -np.inf, copies_alike(network, choices))
    if best is None or other.cost < best.cost * (1 - TOLERANCE):
        return other
    return other if other.alike and not best.alike and other.cost <= best.cost * (1 + TOLERANCE) else best
