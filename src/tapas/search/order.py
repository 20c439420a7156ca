"""In which order variables are eliminated, and how their tables are joined: cheapest table first.

That depends on scopes and sizes, not on any costs: networks that differ in costs only (the same model at other prices,
or on another mesh) share it.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

Scope = tuple[int, ...]

MOST_DIMS = 24  # of a table: numpy has 64
AT_ONCE = 300_000  # up to this many entries are reduced in one numpy call
KNOWN = 64  # so many orders are remembered


@dataclass(frozen=True, slots=True)
class Join:
    """The minimum over a variable of the sum of some tables."""

    views: tuple[tuple[int, tuple[int, ...], tuple[slice | None, ...]], ...]  # table, its dims in order, with new ones
    added: tuple[tuple[int, int], ...]  # to which view is which other one added: small ones to those that cover them
    left: tuple[int, ...]  # views
    shape: tuple[int, ...]  # the variable first
    at_once: bool

    def minimum(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        views = [arrays[number].transpose(dims)[places] for number, dims, places in self.views]
        for home, other in self.added:
            views[home] = views[home] + views[other]
        first, *others = [views[i] for i in self.left]
        if self.at_once:
            return np.minimum.reduce(sum(others, start=first), axis=0)
        best, trial = np.full(self.shape[1:], np.inf), np.empty(self.shape[1:])
        for i in range(self.shape[0]):
            np.add(first[i], others[0][i], out=trial)
            for array in others[1:]:
                np.add(trial, array[i], out=trial)
            np.minimum(best, trial, out=best)
        return best


@dataclass(frozen=True, slots=True)
class Group:
    """Tables of a variable that are minimised together."""

    tables: tuple[int, ...]
    rest: Scope  # what the result is about
    pattern: tuple[Scope, ...]  # the scopes of the tables by places in (variable, *rest)
    join: Join
    work: int  # additions


@dataclass(frozen=True, slots=True)
class Elimination:
    variable: int
    tables: tuple[int, ...]
    groups: tuple[Group, ...]  # several where one would exceed the budget: each is then shifted by a table of its own


@lru_cache(KNOWN)
def eliminations(
    scopes: tuple[Scope, ...], sized: tuple[tuple[int, int], ...], keep: frozenset[int], budget: int
) -> tuple[Elimination, ...]:
    """How to eliminate every variable but the kept ones. Tables are numbered, those that are made as well."""
    sizes, alive = dict(sized), dict(enumerate(scopes))
    serial = len(alive)
    of: dict[int, dict[int, None]] = {v: {} for v in sizes}
    for index, scope in alive.items():
        for v in scope:
            of[v][index] = None
    level = dict.fromkeys(sizes, 0)  # eliminating neighbours in rounds makes chains contract in log depth

    def around(v: int) -> set[int]:
        return {u for i in of[v] for u in alive[i] if u != v}

    def priority(v: int) -> tuple[int, int, int]:
        return prod([sizes[u] for u in neighbours[v]]) * sizes[v], level[v], v

    neighbours = {v: around(v) for v in sizes}
    latest = {v: priority(v) for v in sizes if v not in keep}
    heap = list(latest.values())
    heapq.heapify(heap)
    found = []
    while heap:
        item = heapq.heappop(heap)
        v = item[2]
        if latest.get(v) != item:
            continue  # done, or its neighbours have changed since
        del latest[v]
        ids = tuple(sorted(of[v]))
        touched = neighbours.pop(v)
        parts = _parts(v, {i: alive[i] for i in ids}, sizes, budget)
        shift = [(v,)] if len(parts) > 1 else []
        groups = tuple(_group(v, part, [*(alive[i] for i in part), *shift], sizes) for part in parts)
        found.append(Elimination(v, ids, groups))
        for i in ids:
            for u in alive.pop(i):
                of[u].pop(i, None)
        for group in groups:
            alive[serial] = group.rest
            for u in group.rest:
                of[u][serial] = None
            serial += 1
        for u in touched:
            neighbours[u] = around(u) if len(groups) > 1 else (neighbours[u] | touched) - {u, v}
            level[u] = max(level[u], level[v] + 1)
            if u not in keep:
                latest[u] = priority(u)
                heapq.heappush(heap, latest[u])
    return tuple(found)


def _parts(variable: int, involved: Mapping[int, Scope], sizes: Mapping[int, int], budget: int) -> list[list[int]]:
    """All tables of a variable, the largest first, in one group if it fits the budget, else greedily in several."""

    def fits(joint: set[int]) -> bool:
        return prod([sizes[u] for u in joint]) <= budget and len(joint) <= MOST_DIMS

    ordered = sorted(involved, key=lambda i: -prod([sizes[u] for u in involved[i]]))
    if fits({u for scope in involved.values() for u in scope} - {variable}):
        return [ordered] if ordered else []
    parts: list[tuple[list[int], set[int]]] = []
    for i in ordered:
        for members, scope in parts:
            if fits((scope | {*involved[i]}) - {variable}):
                members.append(i)
                scope |= {*involved[i]}
                break
        else:
            parts.append(([i], {*involved[i]}))
    return [members for members, _ in parts]


def _group(variable: int, tables: Sequence[int], scopes: Sequence[Scope], sizes: Mapping[int, int]) -> Group:
    places: dict[int, int] = {variable: 0}
    pattern = tuple([tuple([places.setdefault(v, len(places)) for v in scope]) for scope in scopes])
    shape = tuple([sizes[v] for v in places])
    return Group(tuple(tables), tuple(places)[1:], pattern, _join(pattern, shape), prod(shape))


def _join(pattern: Sequence[Scope], shape: tuple[int, ...]) -> Join:
    order = sorted(range(len(pattern)), key=lambda i: prod([shape[p] for p in pattern[i]]))
    views, added, left = [], [], list[tuple[int, int]]()
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
    return Join(tuple(views), tuple(added), tuple(i for i, _ in left), shape, at_once)
