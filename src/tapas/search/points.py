"""Partial plans as points, and which of them can be dropped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tapas.search.dominance import undominated
from tapas.search.tables import Table

Rest = Sequence[Sequence[Table]]  # per cut: what is still to come adds up to at least this


@dataclass(frozen=True)
class Cut:
    """No plan that is looked for has more than `most` of this weighted sum of the measures."""

    weights: tuple[float, ...]
    most: float


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
    room: int
    dropped: float = np.inf  # the least that any of those can have of the first cut's sum
    work: int = 0  # points looked at
    weights: np.ndarray = field(init=False)  # [measure, cut]

    def __post_init__(self) -> None:
        self.weights = np.array([cut.weights for cut in self.cuts]).T

    def fitting(self, points: Points, column: Mapping[int, int], rest: Rest) -> np.ndarray:
        """The numbers of the points that some completion may bring within all cuts."""
        self.work += len(points.keys)
        kept = np.flatnonzero(np.isfinite(points.sums[:, 0]))
        for j, cut in enumerate(self.cuts):
            total = points.sums[kept] @ self.weights[:, j] + at(rest[j], column, points.keys[kept])
            kept = kept[total <= cut.most]
        return kept

    def best(self, points: Points, column: Mapping[int, int], rest: Rest, sizes: Sequence[int]) -> np.ndarray:
        """The numbers of the points that none is better than; if they are too many, the most promising of them."""
        kept = undominated(codes(points.keys, sizes), points.sums)
        if len(kept) <= self.room:
            return kept
        totals = points.sums[kept] @ self.weights
        for j in range(len(self.cuts)):
            totals[:, j] += at(rest[j], column, points.keys[kept])
        chosen = np.zeros(len(kept), bool)
        for j in range(len(self.cuts)):  # half by the first cut, the rest by how far they stay below the others
            share = self.room // (2 * len(self.cuts) - 2 if j else 2)
            chosen[np.argsort(totals[:, j], kind="stable")[:share]] = True
        self.dropped = min(self.dropped, float(totals[~chosen, 0].min()))
        return kept[chosen]


def at(tables: Sequence[Table], column: Mapping[int, int], keys: np.ndarray) -> np.ndarray:
    """What tables add up to at each point; `column` says where in `keys` the choice of a variable is."""
    total = np.zeros(len(keys))
    for t in tables:
        total = total + t.array[tuple(keys[:, column[v]] for v in t.scope)]
    return total


def codes(keys: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """One number for the choices of each point."""
    if not len(sizes):
        return np.zeros(len(keys), int)
    if prod(sizes) >= 2**62:
        return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    return np.asarray(np.ravel_multi_index(tuple(keys.T), tuple(sizes)))
