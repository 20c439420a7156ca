"""Exact contraction of a min-plus network by eliminating variables, cheapest table first.

Where a table would exceed the budget the tables of a variable are minimised in groups that fit: the
result is then a lower bound (each group may pick its own choice), and says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tapas.search.order import eliminations
from tapas.search.tables import Table, table

BUDGET = 40_000_000  # entries of the largest table that is ever built
WORK = 1_500_000_000  # additions a contraction may take: a few seconds


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
                dims = [*range(place), *range(place + 1, len(t.scope)), place]
                costs = costs + t.array.transpose(dims)[others]
            best = np.asarray(costs).argmin(-1)
            found[variable] = best if best.ndim else np.full(many, best)
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


def align_to_scope(t: Table, scope: Sequence[int]) -> np.ndarray:
    """The array of a table with one dim for each variable of `scope` (size 1 where it has none)."""
    place = {v: i for i, v in enumerate(t.scope)}
    array = t.array.transpose([place[v] for v in scope if v in place])
    return array[tuple(slice(None) if v in place else None for v in scope)]


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
    result = Contraction([], [], fixed=dict.fromkeys(single, 0))
    work = 0
    for step in eliminations(tuple([t.scope for t in alive.values()]), tuple(sizes.items()), keep, budget):
        result.steps.append((step.variable, tuple([alive[i] for i in step.tables])))
        groups = [[alive[i] for i in group.tables] for group in step.groups]
        if len(groups) > 1:
            result.exact = False
            groups = _matched(step.variable, groups, sizes)
        for i in step.tables:
            del alive[i]
        for group, members in zip(step.groups, groups, strict=True):
            key = tuple([(t.uid, places) for t, places in zip(members, group.pattern, strict=True)])
            made = memo.known.get(key)
            if made is None:
                work += group.work
                if work > limit:
                    raise TooMuchWork
                made = memo.known[key] = table(group.rest, group.join.minimum([t.array for t in members]))
            alive[serial] = made.on(group.rest)
            result.parts.append((step.variable, tuple(members), alive[serial]))
            serial += 1
    result.tables = list(alive.values())
    return result


def _matched(variable: int, groups: list[list[Table]], sizes: Mapping[int, int]) -> list[list[Table]]:
    """Shift costs between the groups of a variable until all see the same for each of its choices.

    The sum stays the same, so the bound stays valid; groups that agree on what a choice costs also tend to
    agree on which one to take, so it becomes tighter."""
    seen = []
    for group in groups:
        scope = tuple(dict.fromkeys((variable, *(v for t in group for v in t.scope))))
        arrays = [align_to_scope(t, scope) for t in group]
        seen.append(np.array([np.min(sum(a[i] for a in arrays)) for i in range(sizes[variable])]))
    mean = sum(seen) / len(seen)
    finite = np.isfinite(mean)
    shifts = [np.where(finite, mean - mine, 0.0) for mine in seen]
    return [[*group, table((variable,), shift)] for group, shift in zip(groups, shifts, strict=True)]
