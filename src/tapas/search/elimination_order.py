"""In which order variables are eliminated, and how their tables are summed: cheapest table first.

That depends on scopes and sizes, not on any costs: networks that differ in costs only (the same model at other prices,
or on another mesh) share it.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from tapas.search.monitor import checkpoint

Scope = tuple[int, ...]

MOST_DIMS = 24  # of a table: numpy has 64
AT_ONCE = 300_000  # up to this many entries are reduced in one numpy call
FEW = 8  # choices: a neighbour with more counts
NEIGHBOURS = 2  # of those has a variable that is easy to eliminate
REMEMBERED = 256  # orders


@dataclass(frozen=True, slots=True)
class MinSum:
    """The minimum over a variable of the sum of some tables."""

    views: tuple[tuple[int, tuple[int, ...], tuple[slice | None, ...]], ...]  # table, its dims in order, with new ones
    added: tuple[tuple[int, int], ...]  # to which view is which other one added: small ones to those that cover them
    left: tuple[int, ...]  # views
    shape: tuple[int, ...]  # the variable first
    at_once: bool

    def minimum(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        views: list[np.ndarray] = [arrays[number].transpose(dims)[places] for number, dims, places in self.views]
        for home, other in self.added:
            views[home] = views[home] + views[other]
        first, *others = [views[i] for i in self.left]
        if self.at_once:
            return np.minimum.reduce(sum(others, start=first), axis=0)
        best, trial = np.full(self.shape[1:], np.inf), np.empty(self.shape[1:])
        for i in range(self.shape[0]):
            checkpoint()
            np.add(first[i], others[0][i], out=trial)
            for array in others[1:]:
                np.add(trial, array[i], out=trial)
            np.minimum(best, trial, out=best)
        return best


@dataclass(frozen=True, slots=True)
class MiniBucket:
    """Tables of a variable that are minimised together."""

    tables: tuple[int, ...]
    rest: Scope  # what the result is about
    pattern: tuple[Scope, ...]  # the scopes of the tables by places in (variable, *rest)
    min_sum: MinSum
    work: int  # additions


@dataclass(frozen=True, slots=True)
class Elimination:
    variable: int
    tables: tuple[int, ...]
    buckets: tuple[MiniBucket, ...]  # several where one would exceed the budget: each is then shifted by a table


@lru_cache(REMEMBERED)
def elimination_order(
    scopes: tuple[Scope, ...], sized: tuple[tuple[int, int], ...], keep: frozenset[int], budget: int,
    easy: bool = False,
) -> tuple[Elimination, ...]:  # fmt: skip
    """How to eliminate every variable but the kept ones, or those of them that are easy to. Tables are numbered, those
    that are made as well.

    >>> path = elimination_order(((0, 1), (1, 2)), ((0, 9), (1, 2), (2, 3)), frozenset(), 100)
    >>> [step.variable for step in path]
    [2, 0, 1]
    """
    sizes, alive = dict(sized), dict(enumerate(scopes))
    serial = len(alive)
    tables_of: dict[int, dict[int, None]] = {v: {} for v in sizes}
    for index, scope in alive.items():
        for v in scope:
            tables_of[v][index] = None
    level = dict.fromkeys(sizes, 0)  # eliminating neighbours in rounds makes chains contract in log depth

    def adjacent(v: int) -> set[int]:
        return {u for i in tables_of[v] for u in alive[i] if u != v}

    def priority(v: int) -> tuple[int, int, int]:
        return prod([sizes[u] for u in neighbours[v]]) * sizes[v], level[v], v

    neighbours = {v: adjacent(v) for v in sizes}
    latest = {v: priority(v) for v in sizes if v not in keep}
    heap = list(latest.values())
    heapq.heapify(heap)
    order: list[Elimination] = []
    while heap:
        item = heapq.heappop(heap)
        v = item[2]
        if latest.get(v) != item:
            continue  # done, or its neighbours have changed since
        del latest[v]
        if easy and not _easy([sizes[u] for u in neighbours[v]], budget):
            continue  # until fewer neighbours are left
        numbers = tuple(sorted(tables_of[v]))
        touched = neighbours.pop(v)
        buckets = _mini_buckets(v, {i: alive[i] for i in numbers}, sizes, budget)
        order.append(Elimination(v, numbers, buckets))
        for i in numbers:
            for u in alive.pop(i):
                tables_of[u].pop(i, None)
        for bucket in buckets:
            alive[serial] = bucket.rest
            for u in bucket.rest:
                tables_of[u][serial] = None
            serial += 1
        for u in touched:
            neighbours[u] = adjacent(u) if len(buckets) > 1 else (neighbours[u] | touched) - {u, v}
            level[u] = max(level[u], level[v] + 1)
            if u not in keep:
                latest[u] = priority(u)
                heapq.heappush(heap, latest[u])
    return tuple(order)


def _easy(neighbours: Sequence[int], budget: int) -> bool:
    """Whether a variable with neighbours of these sizes is eliminated with small tables, mostly of two variables."""
    return prod(neighbours) <= budget and sum([size > FEW for size in neighbours]) <= NEIGHBOURS


def _mini_buckets(
    variable: int, scopes: Mapping[int, Scope], sizes: Mapping[int, int], budget: int
) -> tuple[MiniBucket, ...]:
    """All tables of a variable, the largest first, in one bucket if it fits the budget, else greedily in several."""

    def fits(joint: set[int]) -> bool:
        return prod([sizes[u] for u in joint]) <= budget and len(joint) <= MOST_DIMS

    ordered = sorted(scopes, key=lambda i: -prod([sizes[u] for u in scopes[i]]))
    if fits({u for scope in scopes.values() for u in scope} - {variable}):
        return (_mini_bucket(variable, ordered, [scopes[i] for i in ordered], sizes),) if ordered else ()
    parts: list[tuple[list[int], set[int]]] = []
    for i in ordered:
        for members, joint in parts:
            if fits((joint | {*scopes[i]}) - {variable}):
                members.append(i)
                joint |= {*scopes[i]}
                break
        else:
            parts.append(([i], {*scopes[i]}))
    shift = [(variable,)] if len(parts) > 1 else []
    return tuple([_mini_bucket(variable, part, [*(scopes[i] for i in part), *shift], sizes) for part, _ in parts])


def _mini_bucket(variable: int, tables: Sequence[int], scopes: Sequence[Scope], sizes: Mapping[int, int]) -> MiniBucket:
    places: dict[int, int] = {variable: 0}
    pattern = tuple([tuple([places.setdefault(v, len(places)) for v in scope]) for scope in scopes])
    shape = tuple([sizes[v] for v in places])
    return MiniBucket(tuple(tables), tuple(places)[1:], pattern, _min_sum(pattern, shape), prod(shape))


def _min_sum(pattern: Sequence[Scope], shape: tuple[int, ...]) -> MinSum:
    order = sorted(range(len(pattern)), key=lambda i: prod([shape[p] for p in pattern[i]]))
    views: list[tuple[int, tuple[int, ...], tuple[slice | None, ...]]] = []
    added: list[tuple[int, int]] = []
    left: list[tuple[int, int]] = []
    for here, number in enumerate(order):
        mine = pattern[number]
        dims = tuple([mine.index(p) for p in sorted(mine)])
        views.append((number, dims, tuple([slice(None) if p in mine else None for p in range(len(shape))])))
        bits = sum([1 << p for p in mine if shape[p] > 1])
        # add small tables into larger ones that cover them: fewer passes
        home = next((i for i, others in left if not bits & ~others), None)
        if home is not None:
            added.append((home, here))
            continue
        covered = [i for i, others in left if not others & ~bits]
        added += [(here, i) for i in covered]
        left = [(i, others) for i, others in left if i not in covered] + [(here, bits)]
    at_once = prod(shape) <= AT_ONCE or len(left) == 1
    return MinSum(tuple(views), tuple(added), tuple(i for i, _ in left), shape, at_once)
