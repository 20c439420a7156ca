"""A linear program over whole numbers.

Numbers are brought to about one before HiGHS sees them: it works with absolute tolerances.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapas.search.highs import SparseRow, run_highs

Numbers = Sequence[float] | np.ndarray
NODES = 40  # of the tree that is searched
FOUND = 2  # HiGHS: there is a solution
ROUNDING = 1e-7  # of costs, which are about one
EXCESS = -1  # in rows, the column of the excess: the last one, however many there come to be


@dataclass(frozen=True)
class IntegerSolution:
    values: np.ndarray | None  # whole numbers; None if there is no solution, or none was found
    bound: float  # no solution comes to less
    excess: float = 0.0  # if that is what is wanted
    iterations: int = 0  # of the simplex algorithm: how long it took


@dataclass(frozen=True)
class RelaxedSolution:
    """The best if counts need not be whole numbers."""

    cost: float
    prices: np.ndarray  # of each limited amount: by how much the cost falls if its limit is one higher
    reduced: np.ndarray  # of each column: by how much the cost rises, at least, if its count is one
    values: np.ndarray  # of each column


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
        self.limited: list[tuple[int, float]] = []  # rows that limit amounts, and the units of these

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
        for amount, limit in zip(amounts.T, limits, strict=True):
            self.limited.append((len(self.rows), self.limit_amount(amount, limit)))

    def limit_amount(self, amount: np.ndarray, limit: float) -> float:
        """At most so much, but for the excess; returns the unit. Amounts may be those of the first columns only."""
        unit, some = self.unit if self.excess else _unit(amount), np.flatnonzero(amount)
        columns, weights = some, amount[some] / unit
        if self.excess:
            columns, weights = np.append(some, EXCESS), np.append(weights, -1.0)
        self.add_row(columns, weights, -np.inf, limit / unit)
        return unit

    def minimize_excess(self, amounts: np.ndarray, limits: np.ndarray) -> None:
        """What is wanted: the least that any amount exceeds its limit by."""
        self.unit, self.excess = _unit(amounts), True
        self.limit_amounts(amounts, limits)

    def solve(self, tolerance: float) -> IntegerSolution:
        """A solution that is best, but for so little."""
        import highspy  # only limits need it

        solver, ended = run_highs(
            *self._columns(), self._rows(), self.columns,
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
        every = np.array(solver.getSolution().col_value)
        excess = float(every[-1]) * self.unit if self.excess else 0.0
        values = np.round(every[: self.columns]).astype(int)
        return IntegerSolution(values, bound, excess, info.simplex_iteration_count)

    def relax(self) -> RelaxedSolution | None:
        """The best solution in any numbers, and what the limits are worth there; None if there is none."""
        import highspy

        solver, ended = run_highs(*self._columns(), self._rows())
        if not ended or solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        duals = np.array(solver.getSolution().row_dual)
        prices = [max(0.0, -float(duals[row])) * self.unit / unit for row, unit in self.limited]
        reduced = np.array(solver.getSolution().col_dual)[: self.columns] * self.unit
        values = np.array(solver.getSolution().col_value)[: self.columns]
        return RelaxedSolution(solver.getInfo().objective_function_value * self.unit, np.array(prices), reduced, values)

    def forbid_beyond(self, ceiling: float, columns: int) -> float:
        """Columns that no solution below the ceiling takes are forbidden; if too many are left, so are the least
        promising of these. Returns what solutions that were looked at no more cost at least."""
        relaxed = self.relax()
        if relaxed is None or relaxed.cost > ceiling:
            return ceiling
        most = ceiling - relaxed.cost
        if np.count_nonzero(relaxed.reduced <= most) > columns:
            most = min(most, float(np.partition(relaxed.reduced, columns)[columns]))
        self.forbid(np.flatnonzero(relaxed.reduced > most + ROUNDING * self.unit))
        return relaxed.cost + most

    def _columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Costs, lower and upper bounds."""
        upper = np.concatenate([*self.upper, [np.inf] * self.excess])
        for columns in self.forbidden:
            upper[columns] = 0.0
        costs = np.zeros(len(upper))
        costs[: len(self.costs)] = self.costs
        costs[self.columns :] = 1.0
        return costs, np.concatenate([np.zeros(self.columns), [-np.inf] * self.excess]), upper

    def _rows(self) -> list[SparseRow]:
        return [row._replace(columns=np.where(row.columns == EXCESS, self.columns, row.columns)) for row in self.rows]


def _unit(numbers: np.ndarray) -> float:
    return float(np.abs(numbers).max(initial=0.0)) or 1.0
