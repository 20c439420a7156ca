"""Partial plans as points, and which of them can be dropped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tapas.search.dominance import undominated
from tapas.search.tables import Table

LEAST = 300  # points that are compared in any step
SUCCESSORS = 3
LARGE_STEPS = 4  # that there are at most, as a rule
Rest = Sequence[Sequence[Table]]  # per cut: what is still to come adds up to at least this


@dataclass(frozen=True)
class Cut:
    """No plan that is looked for has more than `most` of this weighted sum of the measures."""

    weights: tuple[float, ...]
    most: float
    value: bool  # how far a plan stays below is by how much it may be better than the best one known


@dataclass(frozen=True, eq=False)
class Points:
    keys: np.ndarray  # [point, variable that is still looked at]
    sums: np.ndarray  # [point, measure]

    def __getitem__(self, index: np.ndarray) -> "Points":
        return Points(self.keys[index], self.sums[index])


@dataclass
class Trim:
    """Drops points, and remembers what it dropped only for want of room."""

    cuts: Sequence[Cut]
    most: int = 0  # points that may be compared in the next step
    dropped: float = np.inf  # those are above some value cut by at least this (below it, if negative)
    work: int = 0  # points compared
    weights: np.ndarray = field(init=False)  # [measure, cut]

    def __post_init__(self) -> None:
        self.weights = np.array([cut.weights for cut in self.cuts]).T

    def allow(self, work: float, steps: int) -> None:
        """Share what work is left among the steps that are left. Few of them take much: each may take a large part."""
        self.most = max(LEAST, int((work - self.work) / min(steps, LARGE_STEPS)))

    @property
    def room(self) -> int:
        """So many points may be kept, as each has several successors."""
        return self.most // SUCCESSORS

    def above(self, points: Points, column: Mapping[int, int], rest: Rest, j: int) -> np.ndarray:
        """By how much each point exceeds a cut at least, however it is completed."""
        return points.sums @ self.weights[:, j] + at(rest[j], column, points.keys) - self.cuts[j].most

    def fitting(self, points: Points, column: Mapping[int, int], rest: Rest) -> np.ndarray:
        """The numbers of the points that some completion may bring within all cuts."""
        kept = np.flatnonzero(np.isfinite(points.sums[:, 0]))
        for j in range(len(self.cuts)):
            kept = kept[self.above(points[kept], column, rest, j) <= 0]
        return kept

    def best(self, points: Points, column: Mapping[int, int], rest: Rest, sizes: Sequence[int]) -> np.ndarray:
        """The numbers of the points that none is better than; if they are too many, the most promising of them."""
        kept = np.arange(len(points.keys))
        if len(kept) > self.most:  # to compare them all would take too long
            kept = self.promising(points, column, rest, self.most)
        self.work += len(kept)
        kept = kept[undominated(codes(points.keys[kept], sizes), points.sums[kept])]
        return kept if len(kept) <= self.room else kept[self.promising(points[kept], column, rest, self.room)]

    def promising(self, points: Points, column: Mapping[int, int], rest: Rest, count: int) -> np.ndarray:
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


def at(tables: Sequence[Table], column: Mapping[int, int], keys: np.ndarray) -> np.ndarray:
    """What tables add up to at each point; `column` says where in `keys` the choice of a variable is."""
    total = np.zeros(len(keys))
    for t in tables:
        total = total + t.array[tuple(keys[:, column[v]] for v in t.scope)]
    return total


def codes(keys: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """One number for the choices of each point."""
    wide = [i for i, size in enumerate(sizes) if size > 1]
    if prod(sizes) >= 2**62:
        return np.unique(keys[:, wide], axis=0, return_inverse=True)[1].reshape(-1)
    code = np.zeros(len(keys), int)
    for i in wide:
        code = code * sizes[i] + keys[:, i]
    return code
