"""Exact search under limits, for networks of few choices: all plans that nothing proves useless, at once.

A partial plan is a point: the choices that later tables still look at, and what it measures so far. Copies are
added one by one, each with all points of its block. Points are dropped that another one with the same choices is
no worse than in any measure, and those that no completion can bring within the cuts. Where there are still too
many, the least promising are dropped too: then the best plan left is only a good one, but it is known how much
better the others could be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tapas.search.around import Around, Wires
from tapas.search.fronts import Fronts, block_fronts, row_fronts
from tapas.search.measures import Measured
from tapas.search.network import Choices
from tapas.search.points import Cut, Points, Rest, Trim, at, codes

BLOCKS = 3  # the part of the work that may be done within blocks, one in so many
Rows = Sequence[np.ndarray]  # per block: [row, own variable]
LOOKED = 10  # points that are looked at, for each that is compared with others
HALVINGS = 14  # to find how promising a point has to be


@dataclass(frozen=True)
class Found:
    choices: Choices | None  # None: nothing within the cuts was found
    dropped: float  # what was not looked at, for want of room, is above some value cut by at least this
    work: int  # points compared

    @property
    def exact(self) -> bool:
        return self.dropped == np.inf


def contracted(
    part: Measured, cuts: Sequence[Cut], goal: Callable[[np.ndarray], np.ndarray], work: float, rows: Rows | None = None
) -> Found:
    """The plan within all cuts that has the least goal, a function of the measures that grows with each of them.

    `work` is how many points may be compared. The first cut has to be a value cut.
    With `rows`, blocks choose only as one of their rows says."""
    wires = Wires(part.network)
    around = [Around(wires, part.weighted(cut.weights)) for cut in cuts]
    if any(a.least > cut.most for a, cut in zip(around, cuts, strict=True)):
        return Found(None, np.inf, 0)
    trim = Trim(cuts)
    if rows is None:
        fronts = [block_fronts(part, b, wires, around, trim, work / BLOCKS) for b in range(len(part.network.blocks))]
    else:
        fronts = [row_fronts(part, b, wires, rows[b]) for b in range(len(part.network.blocks))]
    points, steps = Points(np.zeros((1, 0), int), np.zeros((1, len(part.units)))), []
    for c in range(len(part.network.copies)):
        trim.allow(work, len(part.network.copies) - c)
        front = fronts[part.network.copies[c].block]
        points, parent, entry = _joined(points, front, c, wires, [a.behind[c + 1] for a in around], trim)
        if not len(parent):
            return Found(None, trim.dropped, trim.work)
        steps.append((parent, entry))
    index, rows = int(np.argmin(goal(points.sums))), []
    for copy, (parent, entry) in zip(reversed(part.network.copies), reversed(steps), strict=True):
        rows.append(tuple(fronts[copy.block].choices[entry[index]].tolist()))
        index = int(parent[index])
    shared = {row: row for row in rows}  # equal choices as one object: they are looked up by identity
    return Found(tuple(shared[row] for row in reversed(rows)), trim.dropped, trim.work)


def _joined(
    points: Points, front: Fronts, c: int, wires: Wires, rest: Rest, trim: Trim
) -> tuple[Points, np.ndarray, np.ndarray]:
    """Points with one more copy; and for each which point and which point of the block it is made of."""
    copy, names = wires.network.copies[c], wires.names[c]
    seen, before, after = wires.outward(copy.block), wires.frontier[c], wires.frontier[c + 1]
    old = {v: i for i, v in enumerate(before)}
    new = {names[v]: i for i, v in enumerate(seen) if i >= len(copy.ports)}
    column = {v: i for i, v in enumerate(after)}
    sizes = [wires.network.blocks[copy.block].sizes[v] for v in seen]

    def keys(parent: np.ndarray, entry: np.ndarray) -> np.ndarray:
        chosen = [points.keys[parent, old[v]] if v in old else front.points.keys[entry, new[v]] for v in after]
        return np.column_stack(chosen) if chosen else np.zeros((len(parent), 0), int)

    wanted = points.keys[:, [old[names[v]] for v in seen[: len(copy.ports)]]]
    entries = _Entries(front.points, len(copy.ports), sizes, trim.weights[:, 0])
    parent, group = entries.matching(wanted)
    # what a point of the block may measure at most for both together to stay within the first cut
    base = (points.sums @ trim.weights[:, 0])[parent] + at(rest[0], column, keys(parent, entries.start[group]))
    most, count = entries.allowed(group, base, trim)
    trim.dropped = min(trim.dropped, most)
    parent = np.repeat(parent, count)
    entry = np.repeat(entries.start[group], count) + _counted(count)
    made = Points(keys(parent, entry), points.sums[parent] + entries.points.sums[entry])
    kept = trim.fitting(made, column, rest)
    kept = kept[trim.best(made[kept], column, rest, [wires.sizes[v] for v in after])]
    return made[kept], parent[kept], entries.number[entry[kept]]


class _Entries:
    """The points of a block in groups of the same ports and exports; in each, the least of the first cut first."""

    def __init__(self, points: Points, ports: int, sizes: Sequence[int], weights: np.ndarray) -> None:
        value = points.sums @ weights
        code = codes(points.keys, sizes)
        self.number = np.lexsort((value, code))
        self.points = points[self.number]
        self.value = value[self.number]
        code = code[self.number]
        self.start = np.flatnonzero(np.concatenate([[True], code[1:] != code[:-1]])[: len(code)])
        self.ports, self.sizes = codes(self.points.keys[self.start, :ports], sizes[:ports]), sizes[:ports]
        # whole numbers that say both group and rank: one search for all groups
        self.sorted = np.sort(self.value)
        group = np.repeat(np.arange(len(self.start)), np.diff(self.start, append=len(code)))
        self.rank = group * (len(code) + 1) + np.searchsorted(self.sorted, self.value)

    def matching(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All pairs of a point and a group that have the same choices of the ports."""
        code = codes(wanted, self.sizes)
        first, last = (np.searchsorted(self.ports, code, side) for side in ("left", "right"))
        count = last - first
        return np.repeat(np.arange(len(code)), count), np.repeat(first, count) + _counted(count)

    def allowed(self, group: np.ndarray, base: np.ndarray, trim: Trim) -> tuple[float, np.ndarray]:
        """How many of each group's first entries to take; and what those left out have at least, if too many are."""

        def count(most: float) -> np.ndarray:
            below = np.searchsorted(self.sorted, most - base, "right")
            return np.searchsorted(self.rank, group * (len(self.value) + 1) + below, "left") - self.start[group]

        high = trim.cuts[0].most
        found = count(high)
        if found.sum() <= LOOKED * trim.most:
            return np.inf, found
        # below the cut, by the first of all entries: so far down there are none
        low = float((base + self.value[self.start[group]]).min())
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if count(middle).sum() <= LOOKED * trim.most else (low, middle)
        return low - trim.cuts[0].most, count(low)


def _counted(count: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... for each count, one after the other."""
    return np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
