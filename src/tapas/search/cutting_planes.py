"""Prices for what plans use up, from the plans known so far: two small linear programs.

With prices on top every plan is a line over the prices, and the cheapest of them a concave function: its maximum
over the plans known so far is where to look next (Kelley's cutting planes; for one load, where two lines of the
lower hull of the time/memory trade-off cross).
"""

from dataclasses import dataclass

import numpy as np

from tapas.search.highs import SparseRow, run_highs

TINY = 1e-12  # an excess below that is none


@dataclass(frozen=True)
class PriceMaster:
    prices: np.ndarray
    value: float  # no prices can prove more than this


def lagrangian_prices(costs: np.ndarray, excess: np.ndarray, highest: float) -> PriceMaster:
    """max over prices in [0, highest] of the least cost + prices * excess; excess[plan, load] is amount - limit.

    >>> lagrangian_prices(np.array([1.0, 3.0]), np.array([[2.0], [-2.0]]), 100.0)  # 1 + 2 p = 3 - 2 p
    PriceMaster(prices=array([0.5]), value=2.0)
    """
    prices = _maximin(costs, excess, highest, None)
    return PriceMaster(prices, float((costs + excess @ prices).min()))


def infeasibility_prices(excess: np.ndarray) -> PriceMaster:
    """max over prices that add up to one of the least prices * excess: what the plans overshoot by at least.

    >>> infeasibility_prices(np.array([[3.0, -1.0], [-1.0, 3.0]]))
    PriceMaster(prices=array([0.5, 0.5]), value=1.0)
    """
    prices = _maximin(np.zeros(len(excess)), excess, 1.0, 1.0)
    prices /= prices.sum() or 1.0
    return PriceMaster(prices, float((excess @ prices).min()))


def _maximin(costs: np.ndarray, excess: np.ndarray, upper: float, total: float | None) -> np.ndarray:
    """The prices p in [0, upper], adding up to `total`, with the largest v for which all v <= cost + p * excess."""
    plans, loads = len(excess), int(excess.shape[1])
    every = np.arange(loads + 1)
    free = np.append(np.zeros(loads), np.inf)  # what v is, and prices are not
    weights = np.hstack([-excess, np.ones((plans, 1))])
    rows = [SparseRow(every, row, -np.inf, float(cost)) for row, cost in zip(weights, costs, strict=True)]
    if total is not None:
        rows.append(SparseRow(every[:loads], np.ones(loads), total, total))
    goal = np.append(np.zeros(loads), -1.0)
    solver, _ = run_highs(goal, -free, upper + free, rows, presolve="off", solver="simplex", small_matrix_value=TINY)
    # any prices prove something: should the solver give up, the last ones it had are as good as others
    return np.clip(np.array(solver.getSolution().col_value)[:loads], 0.0, upper)
