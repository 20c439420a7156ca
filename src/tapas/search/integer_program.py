"""A linear program over whole numbers.

Numbers are brought to about one before HiGHS sees them: it works with absolute tolerances.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapas.search.highs import SparseRow, run_highs

Numbers = Sequence[float] | np.ndarray
NODES = 200  # of the tree that is searched
FOUND = 2  # HiGHS: there is a solution


@dataclass(frozen=True)
class IntegerSolution:
    values: np.ndarray | None  # whole numbers; None if there is no solution, or none was found
    bound: float  # no solution comes to less


class IntegerProgram:
    """Columns are counts from 0 up. In rows their weighted sums are within bounds."""

    def __init__(self) -> None:
        self.upper: list[np.ndarray] = []
        self.columns = 0
        self.rows: list[SparseRow] = []
        self.forbidden: list[np.ndarray] = []
        self.costs = np.zeros(0)
        self.unit = 1.0
        self.excess = False  # there is one more column, the excess: any number

    def add_columns(self, count: int, upper: float) -> int:
        """So many columns; returns the first."""
        self.upper.append(np.full(count, float(upper)))
        self.columns += count
        return self.columns - count

    def add_row(self, columns: Numbers, weights: Numbers, low: float, high: float) -> None:
        self.rows.append(SparseRow(np.asarray(columns, np.int32), np.asarray(weights, float), low, high))

    def forbid(self, columns: np.ndarray) -> None:
        self.forbidden.append(columns)

    def minimize_cost(self, costs: np.ndarray) -> None:
        """What is wanted: the least cost."""
        self.unit = _unit(costs)
        self.costs = costs / self.unit

    def limit_amounts(self, amounts: np.ndarray, limits: np.ndarray) -> None:
        """At most so much of each amount."""
        every = np.arange(self.columns)
        for amount, limit in zip(amounts.T, limits, strict=True):
            unit = _unit(amount)
            self.add_row(every[amount != 0], amount[amount != 0] / unit, -np.inf, limit / unit)

    def minimize_excess(self, amounts: np.ndarray, limits: np.ndarray) -> None:
        """What is wanted: the least that any amount exceeds its limit by."""
        self.unit = _unit(amounts)
        every, self.excess = np.arange(self.columns), True
        for amount, limit in zip(amounts.T, limits, strict=True):
            some = every[amount != 0]
            weights = np.append(amount[some] / self.unit, -1.0)
            self.add_row(np.append(some, self.columns), weights, -np.inf, limit / self.unit)
        self.costs = np.append(np.zeros(self.columns), 1.0)

    def solve(self, tolerance: float) -> IntegerSolution:
        """A solution that is best, but for so little."""
        import highspy  # only limits need it

        upper = np.concatenate([*self.upper, [np.inf] * self.excess])
        for columns in self.forbidden:
            upper[columns] = 0.0
        lower = np.concatenate([np.zeros(self.columns), [-np.inf] * self.excess])
        solver, ended = run_highs(
            self.costs, lower, upper, self.rows, self.columns,
            mip_max_nodes=NODES, mip_rel_gap=0.0, mip_abs_gap=tolerance / self.unit,
        )  # fmt: skip
        if not ended:
            return IntegerSolution(None, -np.inf)
        status, info = solver.getModelStatus(), solver.getInfo()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return IntegerSolution(None, np.inf)
        bound = info.mip_dual_bound * self.unit
        if not np.isfinite(info.objective_function_value) or info.primal_solution_status != FOUND:
            return IntegerSolution(None, bound if np.isfinite(bound) else -np.inf)
        if status == highspy.HighsModelStatus.kOptimal:  # it may know more than its bound says
            bound = max(bound, info.objective_function_value * self.unit - tolerance)
        values = np.round(np.array(solver.getSolution().col_value)[: self.columns]).astype(int)
        return IntegerSolution(values, bound)


def _unit(numbers: np.ndarray) -> float:
    return float(np.abs(numbers).max(initial=0.0)) or 1.0
