"""All plans of one block that are worth a look, whatever is around it: found once for all its copies.

Variables are added one by one. Always that one is next which leaves the fewest combinations of choices that
later tables look at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tapas.search.around import BUDGET, Around, Wires
from tapas.search.contract import Memo, contract
from tapas.search.measures import MultiObjectiveNetwork, Scope
from tapas.search.points import Points, Trim
from tapas.search.tables import Table, sum_by_scope


@dataclass(frozen=True, eq=False)
class Fronts:
    points: Points  # with the choices of the ports, then of the exports
    choices: np.ndarray  # [point, own variable]


@dataclass
class _Order:
    """In which order the own variables of a block are added."""

    scopes: Sequence[Scope]
    sizes: Sequence[int]
    ports: Sequence[int]
    exports: Sequence[int]
    variables: list[int] = field(default_factory=list)
    live: list[list[int]] = field(default_factory=list)  # after each: the variables that are still looked at
    due: list[list[int]] = field(default_factory=list)  # with each: the tables that can be read from then on

    def __post_init__(self) -> None:
        self.of: dict[int, list[frozenset[int]]] = {v: [] for v in range(len(self.sizes))}
        for scope in self.scopes:
            for v in scope:
                self.of[v].append(frozenset(scope))
        done, alive = set(self.ports), list(self.ports)
        left = [v for v in range(len(self.sizes)) if v not in done]
        read: set[int] = set()
        while left:
            v = min(left, key=lambda v: (*self._effort(v, done, alive), v))
            alive = self._after(v, done, alive)
            done.add(v)
            left.remove(v)
            self.variables.append(v)
            self.live.append(alive)
            self.due.append([i for i, scope in enumerate(self.scopes) if i not in read and done.issuperset(scope)])
            read.update(self.due[-1])

    def _after(self, v: int, done: set[int], alive: list[int]) -> list[int]:
        stay, now = {*self.ports, *self.exports}, done | {v}
        return [u for u in (*alive, v) if u in stay or any(not scope <= now for scope in self.of[u])]

    def _effort(self, v: int, done: set[int], alive: list[int]) -> tuple[int, bool]:
        return prod(self.sizes[u] for u in self._after(v, done, alive)), not any(s & done for s in self.of[v])


def block_fronts(
    part: MultiObjectiveNetwork, b: int, wires: Wires, around: Sequence[Around], trim: Trim, work: float
) -> Fronts:
    """The points of a block that fit into any of its copies."""
    block, tables = part.network.blocks[b], part.stacked(b)
    ports = list(range(block.own, len(block.sizes)))
    order = _Order([scope for scope, _ in tables], block.sizes, ports, wires.exported[b])
    rest = [_remaining(a.network.blocks[b].tables, a.outside(b), order) for a in around]
    shape = tuple(block.sizes[v] for v in ports)
    grid = np.array([*np.ndindex(*shape)], int).reshape(prod(shape), len(ports))
    points = Points(grid, np.zeros((len(grid), len(part.units))))
    steps, columns = [], ports
    for v, after, due, *here in zip(order.variables, order.live, order.due, *rest, strict=True):
        trim.allow(work, sum(later.own for later in part.network.blocks[b:]) - len(steps))
        parent = np.repeat(np.arange(len(points.keys)), block.sizes[v])
        choice = np.tile(np.arange(block.sizes[v]), len(points.keys))
        wide = {u: i for i, u in enumerate([*columns, v])}
        keys, sums = np.column_stack([points.keys[parent], choice]), points.sums[parent]
        for scope, array in (tables[i] for i in due):
            sums = sums + array[tuple(keys[:, wide[u]] for u in scope)]
        points, columns = Points(keys[:, [wide[u] for u in after]], sums), after
        column = {u: i for i, u in enumerate(after)}
        kept = trim.fitting(points, column, here)
        kept = kept[trim.best(points[kept], column, here, [block.sizes[u] for u in after])]
        points = points[kept]
        steps.append((v, parent[kept], choice[kept]))
    choices, index = np.zeros((len(points.keys), block.own), int), np.arange(len(points.keys))
    for v, parent, choice in reversed(steps):
        choices[:, v] = choice[index]
        index = parent[index]
    return Fronts(Points(points.keys[:, [columns.index(v) for v in wires.outward(b)]], points.sums), choices)


def row_fronts(part: MultiObjectiveNetwork, b: int, wires: Wires, rows: np.ndarray) -> Fronts:
    """The points of a block that chooses as one of these rows, for all choices of its ports."""
    block = part.network.blocks[b]
    shape = tuple(block.sizes[block.own :])
    grid = np.array([*np.ndindex(*shape)], int).reshape(prod(shape), len(shape))
    choices = np.repeat(rows, len(grid), axis=0)
    keys = np.column_stack([choices, np.tile(grid, (len(rows), 1))])
    sums = np.zeros((len(keys), len(part.units)))
    for scope, array in part.stacked(b):
        sums = sums + array[tuple(keys[:, v] for v in scope)]
    return Fronts(Points(keys[:, wires.outward(b)], sums), choices)


def _remaining(weighted: Sequence[Table], outside: list[Table], order: _Order) -> list[list[Table]]:
    """After each variable: what all that is not yet counted comes to at least, outside of the block as well."""
    step_of = {order.scopes[i]: step for step, members in enumerate(order.due) for i in members}
    at_step: list[list[Table]] = [[] for _ in order.variables]
    for t in weighted:
        at_step[step_of.get(t.scope, 0)].append(t)
    found, memo = [outside], Memo()
    for step in range(len(order.variables) - 1, 0, -1):
        here, keep = [*found[-1], *at_step[step]], order.live[step - 1]
        sizes = {v: order.sizes[v] for v in (*keep, *(v for t in here for v in t.scope))}
        found.append(sum_by_scope(contract(here, sizes, keep, BUDGET, memo, limit=np.inf).tables))
    return found[::-1]
