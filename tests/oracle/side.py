"""A network with limits as an integer program, for HiGHS: tables of any number of variables, copies written out.

One binary x for every variable and choice, one y >= 0 for every joint choice of the variables of a table; those that go
with a choice of one of them add up to that x. Costs and amounts are those of the y. What only the most demanding
of some copies adds is one limit for each of these copies.
"""

from collections.abc import Sequence
from itertools import pairwise

import highspy
import numpy as np

from tapas.search import BlockCopy, Load, Network, Table, diagonal_table
from tapas.search.highs import SparseRow, run_highs


def _unfolded(
    network: Network, tables: Sequence[Sequence[Table]], only: BlockCopy | None = None
) -> tuple[list[Table], list[int]]:
    """The tables of all copies, or of one, over variables of their own."""
    sizes, first = [], []
    for copy in network.copies:
        first.append(len(sizes))
        sizes += network.blocks[copy.block].sizes[: network.blocks[copy.block].own]
    found = []
    for c, copy in enumerate(network.copies):
        if only is not None and only is not copy:
            continue
        own = network.blocks[copy.block].own
        names = [*range(first[c], first[c] + own), *(first[source] + v for source, v in copy.ports)]
        found += [diagonal_table([names[v] for v in t.scope], t.array) for t in tables[copy.block]]
    return found, sizes


class _Program:
    """Columns x, then columns y; rows."""

    def __init__(self, sizes: Sequence[int]) -> None:
        ends = np.cumsum([0, *sizes])
        self.x = [np.arange(start, stop) for start, stop in pairwise(ends)]
        self.upper = [np.ones(ends[-1])]
        self.columns = self.binary = int(ends[-1])
        self.y: dict[tuple[int, ...], np.ndarray] = {}  # by variables
        self.forbidden: list[int] = []
        self.rows = [SparseRow(mine, np.ones(len(mine)), 1.0, 1.0) for mine in self.x]

    def entries(self, t: Table) -> np.ndarray:
        """The columns y of a table's entries: the same for tables of the same variables."""
        scope = tuple(sorted(t.scope))
        if scope not in self.y:
            shape = tuple(len(self.x[v]) for v in scope)
            y = self.y[scope] = self.columns + np.arange(int(np.prod(shape))).reshape(shape)
            self.columns += y.size
            self.upper.append(np.ones(y.size))
            if not scope:
                self.rows.append(SparseRow(y.reshape(1), np.ones(1), 1.0, 1.0))
            for dim, v in enumerate(scope):
                for choice, there in enumerate(self.x[v]):
                    members = np.append(y.take(choice, dim).ravel(), there)
                    signs = np.append(np.ones(len(members) - 1), -1.0)
                    self.rows.append(SparseRow(members, signs, 0.0, 0.0))
        return self.y[scope].transpose([scope.index(v) for v in t.scope])

    def total(self, tables: Sequence[Table], unit: float) -> tuple[np.ndarray, np.ndarray]:
        """Columns and weights that add up to what the tables do; what is infinite is forbidden."""
        sums: dict[int, float] = {}
        for t in tables:
            for column, value in zip(self.entries(t).ravel().tolist(), t.array.ravel().tolist(), strict=True):
                if value == np.inf:
                    self.forbidden.append(column)
                elif value:
                    sums[column] = sums.get(column, 0.0) + value / unit
        return np.array([*sums], int), np.array([*sums.values()])


def least_within(network: Network, loads: Sequence[Load]) -> float | None:
    """The least cost within all limits; None if there is no plan."""
    costs, sizes = _unfolded(network, [block.tables for block in network.blocks])
    program = _Program(sizes)
    unit = _largest(costs)
    columns, weights = program.total(costs, unit)
    for load in loads:
        amounts = _unfolded(network, load.blocks)[0]
        turning = [copy for copy in network.copies if load.turns and load.turns[copy.block]]
        turns = [_unfolded(network, load.turns, copy)[0] for copy in turning] or [[]]
        scale = max(_largest([*amounts, *(t for own in turns for t in own)]), abs(load.limit)) or 1.0
        for own in turns:
            program.rows.append(SparseRow(*program.total([*amounts, *own], scale), -np.inf, load.limit / scale))
    cost, upper = np.zeros(program.columns), np.concatenate(program.upper)
    cost[columns], upper[program.forbidden] = weights, 0.0
    solver, ended = run_highs(
        cost, np.zeros(len(cost)), upper, program.rows, program.binary, mip_rel_gap=0.0, mip_abs_gap=1e-9
    )
    status = solver.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return None
    assert ended and status == highspy.HighsModelStatus.kOptimal, solver.modelStatusToString(status)
    return solver.getInfo().objective_function_value * unit


def _largest(tables: Sequence[Table]) -> float:
    return max((float(t.array[np.isfinite(t.array)].max(initial=0.0)) for t in tables), default=0.0) or 1.0
