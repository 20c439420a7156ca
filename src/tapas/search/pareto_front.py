"""All plans of one block that are worth a look, whatever is around it: found once for all its copies.

A partial plan is a point: what it sums up to in each objective. Variables are added one by one, always that one next
which leaves the fewest combinations of choices that later tables look at; dominated points are dropped on the way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tapas.search.contraction import Memo, contract
from tapas.search.cost_tables import Table, sum_by_scope
from tapas.search.dominance import undominated
from tapas.search.elimination_order import Scope
from tapas.search.frontier_messages import BUDGET, FrontierIndex, FrontierMessages
from tapas.search.monitor import checkpoint
from tapas.search.multi_objective import LinearCut, MultiObjectiveNetwork

LEAST = 300  # points that are compared in any step
SUCCESSORS = 3
LARGE_STEPS = 4  # that there are at most, as a rule
Completion = Sequence[Sequence[Table]]  # per cut: what is still to come adds up to at least this


@dataclass(frozen=True, eq=False)
class ParetoPoints:
    keys: np.ndarray  # [point, variable that is still looked at]
    sums: np.ndarray  # [point, column]

    def __getitem__(self, index: np.ndarray) -> "ParetoPoints":
        return ParetoPoints(self.keys[index], self.sums[index])


@dataclass
class PointFilter:
    """Drops points, and remembers what it dropped only for want of room."""

    cuts: Sequence[LinearCut]  # their weights are those of columns
    most: int = 0  # points that may be compared in the next step
    dropped: float = np.inf  # those are above some value cut by at least this (below it, if negative)
    work: int = 0  # points compared
    weights: np.ndarray = field(init=False)  # [column, cut]

    def __post_init__(self) -> None:
        self.weights = np.array([cut.weights for cut in self.cuts]).T

    def allow(self, work: float, steps: int) -> None:
        """Share what work is left among the steps that are left. Few of them take much: each may take a large part."""
        self.most = max(LEAST, int((work - self.work) / min(steps, LARGE_STEPS)))

    @property
    def room(self) -> int:
        """So many points may be kept, as each has several successors."""
        return self.most // SUCCESSORS

    def above(self, points: ParetoPoints, column: Mapping[int, int], rest: Completion, j: int) -> np.ndarray:
        """By how much each point exceeds a cut at least, however it is completed."""
        return points.sums @ self.weights[:, j] + table_sums(rest[j], column, points.keys) - self.cuts[j].most

    def within_cuts(self, points: ParetoPoints, column: Mapping[int, int], rest: Completion) -> np.ndarray:
        """The numbers of the points that some completion may bring within all cuts."""
        numbers = np.flatnonzero(np.isfinite(points.sums[:, 0]))
        for j in range(len(self.cuts)):
            numbers = numbers[self.above(points[numbers], column, rest, j) <= 0]
        return numbers

    def best(
        self, points: ParetoPoints, column: Mapping[int, int], rest: Completion, sizes: Sequence[int]
    ) -> np.ndarray:
        """The numbers of the points that none is better than; if they are too many, the most promising of them."""
        some = np.arange(len(points.keys))
        if len(some) > self.most:  # to compare them all would take too long
            some = self.promising(points, column, rest, self.most)
        self.work += len(some)
        some = some[undominated(mixed_radix(points.keys[some], sizes), points.sums[some])]
        return some if len(some) <= self.room else some[self.promising(points[some], column, rest, self.room)]

    def promising(self, points: ParetoPoints, column: Mapping[int, int], rest: Completion, count: int) -> np.ndarray:
        """Most by their value, some by how far they stay below each of the limits."""
        above = np.stack([self.above(points, column, rest, j) for j in range(len(self.cuts))], axis=1)
        value = above[:, [j for j, cut in enumerate(self.cuts) if cut.value]].max(1)
        others = [j for j, cut in enumerate(self.cuts) if not cut.value]
        chosen = np.zeros(len(value), bool)
        chosen[np.argsort(value, kind="stable")[: count * 3 // 4 if others else count]] = True
        for j in others:
            chosen[np.argsort(above[:, j], kind="stable")[: count // (4 * len(others))]] = True
        self.dropped = min(self.dropped, float(value[~chosen].min(initial=np.inf)))
        return np.flatnonzero(chosen)


def table_sums(tables: Sequence[Table], column: Mapping[int, int], keys: np.ndarray) -> np.ndarray:
    """What tables add up to at each point; `column` says where in `keys` the choice of a variable is."""
    total = np.zeros(len(keys))
    for t in tables:
        total = total + t.array[tuple(keys[:, column[v]] for v in t.scope)]
    return total


def mixed_radix(keys: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """One number for the choices of each point.

    >>> mixed_radix(np.array([[0, 2], [1, 0]]), (2, 3)).tolist()
    [2, 3]
    """
    wide = [i for i, size in enumerate(sizes) if size > 1]
    if prod(sizes) >= 2**62:
        return np.unique(keys[:, wide], axis=0, return_inverse=True)[1].reshape(-1)
    code = np.zeros(len(keys), int)
    for i in wide:
        code = code * sizes[i] + keys[:, i]
    return code


@dataclass(frozen=True, eq=False)
class ParetoFront:
    points: ParetoPoints  # with the choices of the ports, then of the exports
    choices: np.ndarray  # [point, own variable]


@dataclass
class _VariableOrder:
    """In which order the own variables of a block are added."""

    scopes: Sequence[Scope]
    sizes: Sequence[int]
    ports: Sequence[int]
    exports: Sequence[int]
    variables: list[int] = field(default_factory=list[int])
    live: list[list[int]] = field(default_factory=list[list[int]])  # after each: the variables still looked at
    due: list[list[int]] = field(default_factory=list[list[int]])  # with each: the tables that can be read from then on

    def __post_init__(self) -> None:
        self.scopes_of: dict[int, list[frozenset[int]]] = {v: [] for v in range(len(self.sizes))}
        for scope in self.scopes:
            for v in scope:
                self.scopes_of[v].append(frozenset(scope))
        done, alive = set(self.ports), list(self.ports)
        left = [v for v in range(len(self.sizes)) if v not in done]
        single = [v for v in reversed(left) if self.sizes[v] == 1]  # first of all, in any order
        read: set[int] = set()
        while left:
            v = single.pop() if single else min(left, key=lambda v: (*self._effort(v, done, alive), v))
            alive = self._alive_after(v, done, alive)
            done.add(v)
            left.remove(v)
            self.variables.append(v)
            self.live.append(alive)
            self.due.append([i for i, scope in enumerate(self.scopes) if i not in read and done.issuperset(scope)])
            read.update(self.due[-1])

    def _alive_after(self, v: int, done: set[int], alive: list[int]) -> list[int]:
        stay, now = {*self.ports, *self.exports}, done | {v}
        return [u for u in (*alive, v) if u in stay or any(not scope <= now for scope in self.scopes_of[u])]

    def _effort(self, v: int, done: set[int], alive: list[int]) -> tuple[int, bool]:
        unrelated = not any(scope & done for scope in self.scopes_of[v])
        return prod(self.sizes[u] for u in self._alive_after(v, done, alive)), unrelated


def block_front(
    objectives: MultiObjectiveNetwork, b: int, index: FrontierIndex, messages: Sequence[FrontierMessages],
    points_filter: PointFilter, work: float,
) -> ParetoFront:  # fmt: skip
    """The points of a block that fit into any of its copies."""
    blocks = objectives.network.blocks
    block, tables = blocks[b], objectives.stacked(b)
    ports = list(range(block.own, len(block.sizes)))
    order = _VariableOrder([scope for scope, _ in tables], block.sizes, ports, index.exported[b])
    bounds = [_completion_bounds(m.network.blocks[b].tables, m.outside(b), order) for m in messages]
    grid = _all_choices([block.sizes[v] for v in ports])
    points, columns = ParetoPoints(grid, np.zeros((len(grid), len(objectives.column_units)))), ports
    steps: list[tuple[int, np.ndarray, np.ndarray]] = []
    for step, v in enumerate(order.variables):
        checkpoint()
        after, rest = order.live[step], [bound[step] for bound in bounds]
        points_filter.allow(work, sum(later.own for later in blocks[b:]) - step)
        parent = np.repeat(np.arange(len(points.keys)), block.sizes[v])
        choice = np.tile(np.arange(block.sizes[v]), len(points.keys))
        wide = {u: i for i, u in enumerate([*columns, v])}
        keys, sums = np.column_stack([points.keys[parent], choice]), points.sums[parent]
        for scope, array in (tables[i] for i in order.due[step]):
            sums = sums + array[tuple(keys[:, wide[u]] for u in scope)]
        points, columns = ParetoPoints(keys[:, [wide[u] for u in after]], sums), after
        column = {u: i for i, u in enumerate(after)}
        some = points_filter.within_cuts(points, column, rest)
        some = some[points_filter.best(points[some], column, rest, [block.sizes[u] for u in after])]
        points = points[some]
        steps.append((v, parent[some], choice[some]))
    choices, place = np.zeros((len(points.keys), block.own), int), np.arange(len(points.keys))
    for v, parent, choice in reversed(steps):
        choices[:, v] = choice[place]
        place = parent[place]
    keys = points.keys[:, [columns.index(v) for v in index.boundary(b)]]
    return ParetoFront(ParetoPoints(keys, points.sums), choices)


def front_of_rows(objectives: MultiObjectiveNetwork, b: int, index: FrontierIndex, rows: np.ndarray) -> ParetoFront:
    """The points of a block that chooses as one of these rows, for all choices of its ports."""
    block = objectives.network.blocks[b]
    grid = _all_choices(block.sizes[block.own :])
    choices = np.repeat(rows, len(grid), axis=0)
    keys = np.column_stack([choices, np.tile(grid, (len(rows), 1))])
    sums = np.zeros((len(keys), len(objectives.column_units)))
    for scope, array in objectives.stacked(b):
        sums = sums + array[tuple(keys[:, v] for v in scope)]
    return ParetoFront(ParetoPoints(keys[:, index.boundary(b)], sums), choices)


def _all_choices(sizes: Sequence[int]) -> np.ndarray:
    """All combinations, [combination, variable]."""
    return np.array([*np.ndindex(*sizes)], int).reshape(prod(sizes), len(sizes))


def _completion_bounds(weighted: Sequence[Table], outside: list[Table], order: _VariableOrder) -> list[list[Table]]:
    """After each variable: what all that is not yet counted comes to at least, outside of the block as well."""
    step_of = {order.scopes[i]: step for step, members in enumerate(order.due) for i in members}
    at_step: list[list[Table]] = [[] for _ in order.variables]
    for t in weighted:
        at_step[step_of.get(t.scope, 0)].append(t)
    bounds, memo = [outside], Memo()
    for step in range(len(order.variables) - 1, 0, -1):
        here, keep = [*bounds[-1], *at_step[step]], order.live[step - 1]
        sizes = {v: order.sizes[v] for v in (*keep, *(v for t in here for v in t.scope))}
        bounds.append(sum_by_scope(contract(here, sizes, keep, BUDGET, memo, limit=np.inf).tables))
    return bounds[::-1]
