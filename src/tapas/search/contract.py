"""Exact contraction of a min-plus network by eliminating variables, cheapest table first.

Where a table would exceed the budget the tables of a variable are minimised in groups that fit: the
result is then a lower bound (each group may pick its own choice), and says so.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tapas.search.tables import Table, table

BUDGET = 40_000_000  # entries of the largest table that is ever built
WORK = 1_500_000_000  # additions a contraction may take: a few seconds
MOST_DIMS = 24  # of a table: numpy has 64
AT_ONCE = 300_000  # up to this many entries are reduced in one numpy call


class TooMuchWork(Exception):
    """A contraction would take longer than anyone wants to wait."""


@dataclass(slots=True)
class Contraction:
    """What is left after elimination, and the way back to the eliminated variables."""

    tables: list[Table]  # over the kept variables
    steps: list[tuple[int, tuple[Table, ...]]]  # variable and its tables, in order of elimination
    exact: bool = True
    fixed: dict[int, int] = field(default_factory=dict)  # variables with a single choice
    parts: list[tuple[int, tuple[Table, ...], Table]] = field(default_factory=list)  # variable, tables, their minimum

    @property
    def value(self) -> float:
        """The optimum (or, if not exact, a lower bound) when nothing was kept."""
        return float(sum(t.array for t in self.tables if not t.scope))

    def decode(self, choices: Mapping[int, int]) -> dict[int, int]:
        """Complete an assignment of the kept variables by best choices of the eliminated ones."""
        found = self.fixed | dict(choices)
        for variable, involved in reversed(self.steps):
            costs = sum(t.array[tuple(slice(None) if v == variable else found[v] for v in t.scope)] for t in involved)
            found[variable] = int(np.argmin(costs))
        return found

    def decode_all(self, choices: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """The same for many assignments at once."""
        many = len(next(iter(choices.values())))
        found = {v: np.full(many, choice) for v, choice in self.fixed.items()} | dict(choices)
        for variable, involved in reversed(self.steps):
            costs = 0.0
            for t in involved:
                place = t.scope.index(variable)
                others = tuple([found[v] for v in t.scope if v != variable])
                costs = costs + t.array.transpose([*(i for i in range(t.array.ndim) if i != place), place])[others]
            found[variable] = np.broadcast_to(np.argmin(costs, axis=-1), many)
        return found


@dataclass(slots=True)
class Memo:
    """Results of eliminations by what they were made of, so that equal blocks are contracted once."""

    known: dict[tuple, Table] = field(default_factory=dict)


def _without(t: Table, single: frozenset[int], memo: Memo) -> Table:
    """A table without the variables that have only one choice: arrays have no dims to spare for them."""
    gone = tuple(i for i, v in enumerate(t.scope) if v in single)
    if not gone:
        return t
    scope = tuple(v for v in t.scope if v not in single)
    key = ("without", t.uid, gone)
    if key not in memo.known:
        memo.known[key] = table(scope, t.array.squeeze(gone))
    return memo.known[key].on(scope)


def _key(variable: int, involved: Sequence[Table]) -> tuple[tuple, tuple[int, ...]]:
    """The shape of an elimination: which arrays, joined how. And its variables in canonical order."""
    order: dict[int, int] = {variable: 0}
    pattern = []
    for t in involved:
        pattern.append((t.uid, tuple(order.setdefault(v, len(order)) for v in t.scope)))
    return tuple(pattern), tuple(order)[1:]


def aligned(t: Table, scope: Sequence[int]) -> np.ndarray:
    """The array of a table with one dim for each variable of `scope` (size 1 where it has none)."""
    place = {v: i for i, v in enumerate(t.scope)}
    array = t.array.transpose([place[v] for v in scope if v in place])
    return array[tuple(slice(None) if v in place else None for v in scope)]


def _minimise(variable: int, involved: Sequence[Table], rest: tuple[int, ...], sizes: Mapping[int, int]) -> np.ndarray:
    """min over `variable` of the sum of its tables, as an array over `rest`."""
    scope = (variable, *rest)
    merged: list[np.ndarray] = []
    dims: list[int] = []  # of each, a bit for every dim it has
    for array in sorted((aligned(t, scope) for t in involved), key=lambda a: a.size):
        # add small tables into larger ones that cover them: fewer passes below
        mine = sum([1 << i for i, size in enumerate(array.shape) if size > 1])
        home = next((i for i, others in enumerate(dims) if not mine & ~others), None)
        if home is not None:
            merged[home] = merged[home] + array
            continue
        covered = [i for i, others in enumerate(dims) if not others & ~mine]
        array = sum((merged[i] for i in covered), start=array)
        merged = [m for i, m in enumerate(merged) if i not in covered] + [array]
        dims = [d for i, d in enumerate(dims) if i not in covered] + [mine]
    n = sizes[variable]
    if n * prod(sizes[v] for v in rest) <= AT_ONCE or len(merged) == 1:
        return np.min(sum(merged[1:], start=merged[0]), axis=0)
    shape = tuple(sizes[v] for v in rest)
    best, trial = np.full(shape, np.inf), np.empty(shape)
    for i in range(n):
        np.add(merged[0][i], merged[1][i], out=trial)
        for array in merged[2:]:
            np.add(trial, array[i], out=trial)
        np.minimum(best, trial, out=best)
    return best


def contract(
    tables: Iterable[Table],
    sizes: Mapping[int, int],
    keep: Iterable[int] = (),
    budget: int = BUDGET,
    memo: Memo | None = None,
    limit: float = WORK,
) -> Contraction:
    """Eliminate every variable but the kept ones."""
    memo = memo or Memo()
    keep = frozenset(keep)
    single = frozenset(v for v, size in sizes.items() if size == 1 and v not in keep)
    sizes = {v: size for v, size in sizes.items() if v not in single}
    alive: dict[int, Table] = {i: _without(t, single, memo) for i, t in enumerate(tables)}
    serial = len(alive)
    of: dict[int, dict[int, None]] = {v: {} for v in sizes}
    for index, t in alive.items():
        for v in t.scope:
            of[v][index] = None
    level = dict.fromkeys(sizes, 0)  # eliminating neighbours in rounds makes chains contract in log depth
    result = Contraction([], [], fixed=dict.fromkeys(single, 0))
    work = 0

    def around(v: int) -> set[int]:
        return {u for i in of[v] for u in alive[i].scope if u != v}

    def priority(v: int) -> tuple[int, int, int]:
        return prod([sizes[u] for u in neighbours[v]]) * sizes[v], level[v], v

    neighbours = {v: around(v) for v in sizes}
    latest = {v: priority(v) for v in sizes if v not in keep}
    heap = list(latest.values())
    heapq.heapify(heap)
    while heap:
        item = heapq.heappop(heap)
        v = item[2]
        if latest.get(v) != item:
            continue  # done, or its neighbours have changed since
        del latest[v]
        ids = sorted(of[v])
        involved = tuple(alive[i] for i in ids)
        result.steps.append((v, involved))
        touched = neighbours.pop(v)
        groups = _groups(v, involved, sizes, budget)
        if len(groups) > 1:
            result.exact = False
            groups = _matched(v, groups, sizes)
        for i in ids:
            for u in alive.pop(i).scope:
                of[u].pop(i, None)
        for group in groups:
            pattern, rest = _key(v, group)
            made = memo.known.get(pattern)
            if made is None:
                work += sizes[v] * prod(sizes[u] for u in rest)
                if work > limit:
                    raise TooMuchWork
                made = memo.known[pattern] = table(rest, _minimise(v, group, rest, sizes))
            alive[serial] = made.on(rest)
            result.parts.append((v, tuple(group), alive[serial]))
            for u in rest:
                of[u][serial] = None
            serial += 1
        for u in touched:
            neighbours[u] = around(u) if len(groups) > 1 else (neighbours[u] | touched) - {u, v}
            level[u] = max(level[u], level[v] + 1)
            if u not in keep:
                latest[u] = priority(u)
                heapq.heappush(heap, latest[u])
    result.tables = list(alive.values())
    return result


def _groups(variable: int, involved: Sequence[Table], sizes: Mapping[int, int], budget: int) -> list[list[Table]]:
    """All tables of a variable in one group if it fits the budget, else greedily in several."""
    ordered = sorted(involved, key=lambda t: -t.array.size)
    joint = {u for t in involved for u in t.scope if u != variable}
    if prod(sizes[u] for u in joint) <= budget and len(joint) <= MOST_DIMS:
        return [ordered] if ordered else []
    groups: list[tuple[list[Table], set[int]]] = []
    for t in ordered:
        for members, scope in groups:
            joint = (scope | set(t.scope)) - {variable}
            if prod(sizes[u] for u in joint) <= budget and len(joint) <= MOST_DIMS:
                members.append(t)
                scope |= set(t.scope)
                break
        else:
            groups.append(([t], set(t.scope)))
    return [members for members, _ in groups]


def _matched(variable: int, groups: list[list[Table]], sizes: Mapping[int, int]) -> list[list[Table]]:
    """Shift costs between the groups of a variable until all see the same for each of its choices.

    The sum stays the same, so the bound stays valid; groups that agree on what a choice costs also tend to
    agree on which one to take, so it becomes tighter."""
    seen = []
    for group in groups:
        rest = _key(variable, group)[1]
        scope = (variable, *rest)
        arrays = [aligned(t, scope) for t in group]
        seen.append(np.array([np.min(sum(a[i] for a in arrays)) for i in range(sizes[variable])]))
    mean = sum(seen) / len(seen)
    finite = np.isfinite(mean)
    shifts = [np.where(finite, mean - mine, 0.0) for mine in seen]
    return [[*group, table((variable,), shift)] for group, shift in zip(groups, shifts, strict=True)]
