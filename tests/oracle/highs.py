"""The same tables as an integer program on the unfolded graph, solved by HiGHS: an oracle for the search.

One binary x for every variable and choice; for every table of two variables one y >= 0 per pair of
choices, whose sums over rows and columns are the x at its ends. With x integral, y is the pair that was
chosen, so y need not be declared integer. Nothing here knows of blocks, elimination or routes: copies are
written out one by one.

Most y are far too dear to be wanted, so they are brought in as needed (column generation): solve with
some of them, price all the others, add those that would help, until none does. What is left out then
provably changes nothing.

On three mesh axes the tables have millions of entries. There, choices that cannot be part of any plan
cheaper than a known one are left out first (`reduced`): by a lower bound from costs that are moved between
tables without changing the cost of any plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import highspy
import numpy as np

from tapas.search import Network

INTEGRAL = 1e-6  # how far from 1 the largest x of a variable may be
PRICE = 1e-10  # reduced costs above minus this help no more (costs are scaled to about 1)
FEW = 3  # of each row and column, so many y are in from the start
ALL = 200_000  # up to so many y are all in from the start


@dataclass(frozen=True)
class Unfolded:
    """Costs of single variables and of pairs of them, over the whole graph."""

    alone: list[np.ndarray]
    pairs: list[tuple[int, int, np.ndarray]]


def unfold(network: Network) -> Unfolded:
    """Every copy's own variables and tables, written out."""
    first: list[int] = []
    alone: list[np.ndarray] = []
    for copy in network.copies:
        block = network.blocks[copy.block]
        first.append(len(alone))
        alone += [np.zeros(size) for size in block.sizes[: block.own]]
    pairs: dict[tuple[int, int], np.ndarray] = {}
    for number, copy in enumerate(network.copies):
        block = network.blocks[copy.block]
        place = [first[number] + v for v in range(block.own)] + [first[c] + v for c, v in copy.ports]
        for table in block.tables:
            scope = [place[v] for v in table.scope]
            if len(set(scope)) == 1:
                alone[scope[0]] = alone[scope[0]] + (table.array if len(scope) == 1 else np.diagonal(table.array))
                continue
            low, high = sorted(scope)
            array = table.array if scope == [low, high] else table.array.T
            pairs[low, high] = pairs[low, high] + array if (low, high) in pairs else array
    return Unfolded(alone, [(u, v, array) for (u, v), array in pairs.items()])


def evaluate(graph: Unfolded, choices: Sequence[int]) -> float:
    """What an assignment costs, added up over the unfolded graph."""
    alone = sum(float(costs[choice]) for costs, choice in zip(graph.alone, choices, strict=True))
    return alone + sum(float(array[choices[u], choices[v]]) for u, v, array in graph.pairs)


class _Moving:
    """Tables whose costs move to the variables they share and on to the next tables, so that the least
    entries of all tables and variables add up to more and more: a lower bound, as no plan's cost changes."""

    def __init__(self, graph: Unfolded, known: float) -> None:
        """In units of the known cost; a thousand of them stand for infinity."""
        self.alone = [np.where(np.isfinite(costs), costs / known, 1e3) for costs in graph.alone]
        self.pairs = [(u, v, np.where(np.isfinite(array), array / known, 1e3)) for u, v, array in graph.pairs]
        self.of: list[list[int]] = [[] for _ in graph.alone]
        for e, (u, v, _) in enumerate(self.pairs):
            self.of[u].append(e)
            self.of[v].append(e)

    def _facing(self, e: int, v: int) -> np.ndarray:
        """The table with the choices of `v` as rows."""
        return self.pairs[e][2] if self.pairs[e][0] == v else self.pairs[e][2].T

    def sweep(self, order: Sequence[int]) -> None:
        rank = {v: i for i, v in enumerate(order)}
        for v in order:
            for e in self.of[v]:
                array = self._facing(e, v)
                least = array.min(1)
                array -= least[:, None]
                self.alone[v] += least
            later = [e for e in self.of[v] if rank[sum(self.pairs[e][:2]) - v] > rank[v]]
            share = self.alone[v] / max(len(later), len(self.of[v]) - len(later), 1)
            for e in later:
                array = self._facing(e, v)
                array += share[:, None]
                self.alone[v] -= share

    def keep(self, chosen: list[np.ndarray]) -> None:
        self.alone = [costs[mine] for costs, mine in zip(self.alone, chosen, strict=True)]
        self.pairs = [(u, v, array[np.ix_(chosen[u], chosen[v])]) for u, v, array in self.pairs]

    def bounds(self) -> list[np.ndarray]:
        """For each variable and choice: what plans with it cost at least."""
        least = [array.min() for _, _, array in self.pairs]
        total = sum(costs.min() for costs in self.alone) + sum(least)
        found = []
        for v, costs in enumerate(self.alone):
            rise = costs - costs.min()
            for e in self.of[v]:
                rise = rise + self._facing(e, v).min(1) - least[e]
            found.append(total + rise)
        return found


def reduced(graph: Unfolded, known: float, rounds: int = 20) -> tuple[Unfolded, list[np.ndarray]]:
    """The graph without choices that only plans dearer than `known` can have, and the choices left."""
    moving = _Moving(graph, known)
    forward = range(len(graph.alone))
    left = [np.arange(len(costs)) for costs in graph.alone]
    for _ in range(rounds):
        for _ in range(3):
            moving.sweep(forward)
            moving.sweep(forward[::-1])
        fits = [np.flatnonzero(bounds <= 1 + 1e-7) for bounds in moving.bounds()]
        moving.keep(fits)
        left = [choices[chosen] for choices, chosen in zip(left, fits, strict=True)]
    alone = [costs[chosen] for costs, chosen in zip(graph.alone, left, strict=True)]
    return Unfolded(alone, [(u, v, array[np.ix_(left[u], left[v])]) for u, v, array in graph.pairs]), left


@dataclass
class _Pair:
    """A table of two variables: equal rows (and columns) are one class, with one equation."""

    u: int
    v: int
    costs: np.ndarray  # [class of rows, class of columns]
    row_of: np.ndarray  # choice of u -> class
    column_of: np.ndarray
    base: int = 0  # number of its first equation
    present: np.ndarray = None  # type: ignore[assignment]  # which y are in the program

    def first(self, everything: bool) -> np.ndarray:
        finite = np.isfinite(self.costs)
        if everything:
            return finite
        wanted = np.zeros(self.costs.shape, bool)
        cheap = np.argsort(self.costs, axis=1)[:, :FEW]
        np.put_along_axis(wanted, cheap, True, axis=1)
        cheap = np.argsort(self.costs, axis=0)[:FEW]
        np.put_along_axis(wanted, cheap, True, axis=0)
        return wanted & finite


def _classes(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _, first, inverse = np.unique(array, axis=0, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def _pair(u: int, v: int, array: np.ndarray) -> _Pair:
    rows, row_of = _classes(array)
    columns, column_of = _classes(array.T)
    return _Pair(u, v, array[np.ix_(rows, columns)], row_of, column_of)


class _Program:
    def __init__(self, graph: Unfolded, seconds: float) -> None:
        self.unit = max(float(np.max(c[np.isfinite(c)], initial=0.0)) for c in graph.alone) or 1.0
        alone = [costs / self.unit for costs in graph.alone]
        self.pairs: list[_Pair] = []
        for u, v, array in graph.pairs:
            array = array / self.unit
            # what every entry of a row or a column costs at least is a cost of its variable alone
            for axis, end in ((1, u), (0, v)):
                least = array.min(axis)
                alone[end] = alone[end] + least
                array = array - np.where(np.isfinite(least), least, 0.0)[(slice(None), None) if axis else ...]
            if array.any():
                self.pairs.append(_pair(u, v, array))
        ends = np.cumsum([0] + [len(costs) for costs in alone])
        self.x = [np.arange(*span) for span in pairwise(ends)]
        self.solver = _solver(seconds)
        self.height = len(alone)
        for pair in self.pairs:
            pair.base = self.height
            self.height += sum(pair.costs.shape)
        self.columns = 0
        self._rows(len(alone))
        self._x(alone)
        total = sum(pair.costs.size for pair in self.pairs)
        for pair in self.pairs:
            pair.present = np.zeros(pair.costs.shape, bool)
        self.add([pair.first(total <= ALL) for pair in self.pairs])

    def _rows(self, variables: int) -> None:
        right = np.zeros(self.height)
        right[:variables] = 1.0
        none = np.zeros(0)
        self.solver.addRows(self.height, right, right, 0, np.zeros(self.height, np.int32), none.astype(np.int32), none)

    def _x(self, alone: list[np.ndarray]) -> None:
        """Each x is in the equation of its variable (they add up to one) and in one of each pair."""
        rows: list[list[np.ndarray]] = [[np.full(len(costs), v)] for v, costs in enumerate(alone)]
        for pair in self.pairs:
            rows[pair.u].append(pair.base + pair.row_of)
            rows[pair.v].append(pair.base + len(pair.costs) + pair.column_of)
        for costs, places in zip(alone, rows, strict=True):
            values = np.full((len(costs), len(places)), -1.0)
            values[:, 0] = 1.0
            self._columns(costs, np.stack(places, axis=1), values, np.where(np.isfinite(costs), 1.0, 0.0))

    def _columns(self, costs: np.ndarray, rows: np.ndarray, values: np.ndarray, upper: np.ndarray) -> None:
        count, each = rows.shape
        starts = np.arange(0, count * each, each, dtype=np.int32)
        costs = np.where(np.isfinite(costs), costs, 0.0)
        self.solver.addCols(
            count, costs, np.zeros(count), upper, rows.size, starts, rows.ravel().astype(np.int32), values.ravel()
        )
        self.columns += count

    def add(self, wanted: list[np.ndarray]) -> int:
        """Bring in the y that are wanted and not yet there."""
        before = self.columns
        for pair, mask in zip(self.pairs, wanted, strict=True):
            i, j = np.nonzero(mask & ~pair.present)
            pair.present |= mask
            rows = np.stack([pair.base + i, pair.base + len(pair.costs) + j], axis=1)
            self._columns(pair.costs[i, j], rows, np.ones(rows.shape), np.full(len(i), np.inf))
        return self.columns - before

    def run(self) -> float:
        self.solver.run()
        status = self.solver.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise RuntimeError(f"HiGHS stopped with: {self.solver.modelStatusToString(status)}")
        return self.solver.getInfo().objective_function_value

    def reduced(self) -> list[np.ndarray]:
        """The reduced cost of every y, there or not."""
        dual = np.array(self.solver.getSolution().row_dual)
        found = []
        for pair in self.pairs:
            middle = pair.base + len(pair.costs)
            rows, columns = dual[pair.base : middle], dual[middle : middle + pair.costs.shape[1]]
            found.append(pair.costs - rows[:, None] - columns[None, :])
        return found

    def relax(self) -> float:
        """The optimum of the linear relaxation with all y."""
        while True:
            value = self.run()
            if not self.add([costs < -PRICE for costs in self.reduced()]):
                return value

    def choices(self) -> tuple[int, ...] | None:
        value = np.array(self.solver.getSolution().col_value)
        if any(value[columns].max() < 1 - INTEGRAL for columns in self.x):
            return None
        return tuple(int(np.argmax(value[columns])) for columns in self.x)

    def branch(self, bound: float) -> tuple[int, ...]:
        """Integer x. With all y whose reduced cost fits the gap to some integer plan, that is exact."""
        reduced = self.reduced()
        columns = np.concatenate(self.x)
        kinds = np.full(len(columns), highspy.HighsVarType.kInteger)
        self.solver.changeColsIntegrality(len(columns), columns.astype(np.int32), kinds)
        value = self.run()
        self.add([costs <= value - bound + PRICE for costs in reduced])
        self.run()
        found = self.choices()
        assert found is not None
        return found


def _solver(seconds: float) -> highspy.Highs:
    solver = highspy.Highs()
    for option, value in {
        "output_flag": False, "threads": 1, "time_limit": seconds, "mip_rel_gap": 0.0, "mip_abs_gap": 1e-9,
        "primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-10, "mip_feasibility_tolerance": 1e-9,
    }.items():  # fmt: skip
        solver.setOptionValue(option, value)
    return solver


@dataclass(frozen=True)
class Optimum:
    cost: float
    choices: tuple[int, ...]  # of every variable of the unfolded graph
    relaxed: bool  # the linear relaxation was integral as it stood
    columns: int


def optimum(network: Network, seconds: float = 600.0, known: float | None = None) -> Optimum:
    """The integer program's optimum; an error if it was not proven in time, or if all plans cost more than `known`."""
    graph = unfold(network)
    program, left = graph, [np.arange(len(costs)) for costs in graph.alone]
    if known is not None:
        program, left = reduced(graph, known)
    solver = _Program(program, seconds)
    bound = solver.relax()
    choices = solver.choices()  # where the relaxation is integral it is the optimum: no need to branch
    relaxed = choices is not None
    if choices is None:
        choices = solver.branch(bound)
    choices = tuple(int(chosen[choice]) for chosen, choice in zip(left, choices, strict=True))
    return Optimum(evaluate(graph, choices), choices, relaxed, solver.columns)
