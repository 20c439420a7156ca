"""Exact contraction of a min-plus network by eliminating variables, cheapest table first.

Where a table would exceed the budget the tables of a variable are minimised in mini-buckets that fit: the
result is then a lower bound (each bucket may pick its own choice), and says so.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tapas.search.cost_tables import Table, align_to_scope, table
from tapas.search.elimination_order import elimination_order
from tapas.search.monitor import checkpoint

BUDGET = 40_000_000  # entries of the largest table that is ever built
WORK = 1_500_000_000  # additions a contraction may take: a few seconds

BucketKey = tuple[tuple[int, tuple[int, ...]], ...]  # uid of each table, and the places of its variables


class TooMuchWork(Exception):
    """A contraction would take longer than anyone wants to wait."""


@dataclass(frozen=True, slots=True)
class BucketMinimum:
    """What minimising the tables of one bucket came to."""

    variable: int
    tables: tuple[Table, ...]
    minimum: Table


@dataclass(slots=True)
class Contraction:
    """What is left after elimination, and the way back to the eliminated variables."""

    tables: list[Table]  # over the kept variables
    steps: list[tuple[int, tuple[Table, ...]]]  # variable and its tables, in order of elimination
    buckets: list[BucketMinimum]
    fixed: dict[int, int]  # variables with a single choice
    exact: bool = True

    @property
    def value(self) -> float:
        """The optimum (or, if not exact, a lower bound) when nothing was kept."""
        return float(sum(t.array for t in self.tables if not t.scope))

    def decode(self, choices: Mapping[int, int]) -> dict[int, int]:
        """Complete an assignment of the kept variables by best choices of the eliminated ones."""
        complete = self.fixed | dict(choices)
        for variable, tables in reversed(self.steps):
            costs = sum(t.array[tuple(slice(None) if v == variable else complete[v] for v in t.scope)] for t in tables)
            complete[variable] = int(np.argmin(costs))
        return complete

    def decode_all(self, choices: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """The same for many assignments at once."""
        count = len(next(iter(choices.values())))
        complete = {v: np.full(count, choice) for v, choice in self.fixed.items()} | dict(choices)
        for variable, tables in reversed(self.steps):
            costs = np.zeros(())
            for t in tables:
                place = t.scope.index(variable)
                others = tuple([complete[v] for v in t.scope if v != variable])
                dims = [*range(place), *range(place + 1, len(t.scope)), place]
                costs = costs + t.array.transpose(dims)[others]
            best = np.asarray(costs.argmin(-1))
            complete[variable] = best if best.ndim else np.full(count, best)
        return complete


@dataclass(slots=True)
class Memo:
    """Results of eliminations by what they were made of, so that equal blocks are contracted once."""

    minima: dict[BucketKey, Table] = field(default_factory=dict[BucketKey, Table])
    squeezed: dict[tuple[int, tuple[int, ...]], Table] = field(default_factory=dict[tuple[int, tuple[int, ...]], Table])


def contract(
    tables: Iterable[Table],
    sizes: Mapping[int, int],
    keep: Iterable[int] = (),
    budget: int = BUDGET,
    memo: Memo | None = None,
    limit: float = WORK,
    easy: bool = False,
) -> Contraction:
    """Eliminate every variable but the kept ones, or only those of them that are easy to.

    >>> pair = table((0, 1), np.array([[4.0, 1.0], [2.0, 9.0]]))
    >>> best = contract([pair, table((1,), np.array([0.0, 3.0]))], {0: 2, 1: 2})
    >>> best.value, sorted(best.decode({}).items())
    (2.0, [(0, 1), (1, 0)])
    """
    shared = memo is not None
    memo = memo or Memo()
    keep = frozenset(keep)
    single = frozenset(v for v, size in sizes.items() if size == 1 and v not in keep)
    sizes = {v: size for v, size in sizes.items() if v not in single}
    alive: dict[int, Table] = {i: _squeeze(t, single, memo) for i, t in enumerate(tables)}
    serial = len(alive)
    result = Contraction([], [], [], dict.fromkeys(single, 0))
    work = 0
    scopes = tuple([t.scope for t in alive.values()])
    order = elimination_order(scopes, tuple(sizes.items()), keep, budget, easy)
    if not shared and sum([bucket.work for step in order for bucket in step.buckets]) > limit:
        raise TooMuchWork  # before any of it is done
    for step in order:
        result.steps.append((step.variable, tuple([alive[i] for i in step.tables])))
        members = [[alive[i] for i in bucket.tables] for bucket in step.buckets]
        if len(members) > 1:
            result.exact = False
            members = _match_min_marginals(step.variable, members, sizes)
        for i in step.tables:
            del alive[i]
        for bucket, group in zip(step.buckets, members, strict=True):
            key = tuple([(t.uid, places) for t, places in zip(group, bucket.pattern, strict=True)])
            minimum = memo.minima.get(key)
            if minimum is None:
                checkpoint()
                work += bucket.work
                if work > limit:
                    raise TooMuchWork
                minimum = memo.minima[key] = table(bucket.rest, bucket.min_sum.minimum([t.array for t in group]))
            alive[serial] = minimum.on(bucket.rest)
            result.buckets.append(BucketMinimum(step.variable, tuple(group), alive[serial]))
            serial += 1
    result.tables = list(alive.values())
    return result


def _squeeze(t: Table, single: frozenset[int], memo: Memo) -> Table:
    """A table without the variables that have only one choice: arrays have no dims to spare for them."""
    dims = tuple(i for i, v in enumerate(t.scope) if v in single)
    if not dims:
        return t
    scope = tuple(v for v in t.scope if v not in single)
    key = t.uid, dims
    if key not in memo.squeezed:
        memo.squeezed[key] = table(scope, t.array.squeeze(dims))
    return memo.squeezed[key].on(scope)


def _match_min_marginals(variable: int, groups: list[list[Table]], sizes: Mapping[int, int]) -> list[list[Table]]:
    """Shift costs between the buckets of a variable until all see the same for each of its choices.

    The sum stays the same, so the bound stays valid; buckets that agree on what a choice costs also tend to
    agree on which one to take, so it becomes tighter."""
    marginals: list[np.ndarray] = []
    for group in groups:
        scope = tuple(dict.fromkeys((variable, *(v for t in group for v in t.scope))))
        arrays = [align_to_scope(t, scope) for t in group]
        marginals.append(np.array([np.min(sum(a[i] for a in arrays)) for i in range(sizes[variable])]))
    mean = sum(marginals[1:], start=marginals[0]) / len(marginals)
    finite = np.isfinite(mean)
    shifts = [np.where(finite, mean, 0.0) - np.where(finite, mine, 0.0) for mine in marginals]
    return [[*group, table((variable,), shift)] for group, shift in zip(groups, shifts, strict=True)]
