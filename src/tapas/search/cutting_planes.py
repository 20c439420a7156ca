"""Prices for what plans use up, from the plans met so far: two small linear programs.

With prices on top every plan is a line over the prices, and the cheapest of them a concave function: its maximum
over the plans known so far is where to look next (Kelley's cutting planes; for one load, where two lines of the
lower hull of the time/memory trade-off cross).
"""

from dataclasses import dataclass

import numpy as np

ROUNDING = 1e-11
PIVOTS = 2_000


@dataclass(frozen=True)
class PriceMaster:
    prices: np.ndarray
    value: float  # no prices can prove more than this


def lagrangian_prices(costs: np.ndarray, over: np.ndarray, highest: float) -> PriceMaster:
    """max over prices in [0, highest] of the least cost + prices * over; over[plan, load] is amount - limit."""
    count, loads = over.shape
    eye = np.eye(loads)
    columns = np.zeros((loads + 1, count + 2 * loads))
    columns[:loads] = np.hstack([over.T, eye, -eye])
    columns[loads, :count] = 1.0
    price = np.concatenate([costs, np.zeros(loads), np.full(loads, highest)])
    first = int(np.argmin(np.maximum(over, 0.0).sum(1)))
    basis = [count + k if over[first, k] <= 0 else count + loads + k for k in range(loads)] + [first]
    prices = np.clip(-_simplex(columns, price, basis)[:loads], 0.0, highest)
    return PriceMaster(prices, float((costs + over @ prices).min()))


def infeasibility_prices(over: np.ndarray) -> PriceMaster:
    """max over prices that add up to one of the least prices * over: what the plans overshoot by at least."""
    count, loads = over.shape
    shift = float(over.min())  # the program's variables cannot be negative
    columns = np.zeros((loads + 1, count + loads + 1))
    columns[:loads] = np.hstack([over.T - shift, np.eye(loads), -np.ones((loads, 1))])
    columns[loads, :count] = 1.0
    price = np.zeros(count + loads + 1)
    price[-1] = 1.0
    top = int(np.argmax(over[0]))
    basis = [count + loads if k == top else count + k for k in range(loads)] + [0]
    prices = np.clip(-_simplex(columns, price, basis)[:loads], 0.0, None)
    prices /= prices.sum() or 1.0
    return PriceMaster(prices, float((over @ prices).min()))


def _simplex(columns: np.ndarray, price: np.ndarray, basis: list[int]) -> np.ndarray:
    """The dual of: min price * x, columns @ x = (0, ..., 0, 1), x >= 0; from a feasible basis. Bland's rule: it never
    cycles."""
    basis = list(basis)
    right = np.zeros(len(columns))
    right[-1] = 1.0
    for _ in range(PIVOTS):
        inverse = np.linalg.pinv(columns[:, basis])
        dual = price[basis] @ inverse
        reduced = price - dual @ columns
        reduced[basis] = 0.0
        entering = np.flatnonzero(reduced < -ROUNDING * (1 + np.abs(price)))
        if not len(entering):
            break
        j = int(entering[0])
        step, now = inverse @ columns[:, j], inverse @ right
        usable = [i for i in range(len(basis)) if step[i] > ROUNDING]
        if not usable:
            break  # only rounding can bring us here: the program is bounded
        ratios = {i: max(now[i], 0.0) / step[i] for i in usable}
        least = min(ratios.values())
        basis[min((i for i in usable if ratios[i] <= least + ROUNDING), key=lambda i: basis[i])] = j
    return price[basis] @ np.linalg.pinv(columns[:, basis])
