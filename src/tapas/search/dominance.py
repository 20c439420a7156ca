"""Which points no other point is at least as good as, in every measure."""

from bisect import bisect_right
from itertools import pairwise

import numpy as np

GRID = 2.0**-43  # measures are about one: what differs by less is the same but for rounding
CHUNK = 256


def undominated(code: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """The numbers of points (one of several equal ones); only points with the same code are compared."""
    steps = np.rint(sums / GRID).astype(np.int64)  # whole numbers: sums in another order come out the same
    order = np.lexsort((*steps.T[::-1], code))
    code, steps = code[order], steps[order]
    if not len(order):
        return order
    first = np.concatenate([[True], code[1:] != code[:-1]])
    if sums.shape[1] == 1:
        return order[first]
    if sums.shape[1] == 2:
        return order[_staircase(first, steps[:, 1])]
    starts = [*np.flatnonzero(first).tolist(), len(code)]
    filtered = _swept if sums.shape[1] == 3 else _compared
    kept = [filtered(steps[i:j, 1:]) + i for i, j in pairwise(starts)]
    return order[np.concatenate(kept)]


def _staircase(first: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Points come by code, then by cost: those stay whose load is less than all before."""
    rank = np.unique(load, return_inverse=True)[1].reshape(-1)
    height = rank - np.cumsum(first) * (len(rank) + 1)  # each code below those before: one running minimum for all
    lowest = np.minimum.accumulate(height)
    return np.flatnonzero(np.concatenate([[True], height[1:] < lowest[:-1]]))


def _swept(loads: np.ndarray) -> np.ndarray:
    """Points come by cost: those stay that no earlier one is below in both loads. The lower hull of those so far
    is a stair: the more of one load, the less of the other."""
    ones: list[int] = []
    others: list[int] = []
    kept: list[int] = []
    for number, (one, other) in enumerate(loads.tolist()):
        place = bisect_right(ones, one)
        if place and others[place - 1] <= other:
            continue
        kept.append(number)
        start = place - 1 if place and ones[place - 1] == one else place
        stop = place
        while stop < len(ones) and others[stop] >= other:
            stop += 1
        ones[start:stop], others[start:stop] = [one], [other]
    return np.array(kept, int)


def _compared(loads: np.ndarray) -> np.ndarray:
    """Points come by cost: those stay that no earlier one is below in every load."""
    kept = np.zeros(0, int)
    for start in range(0, len(loads), CHUNK):
        some = np.arange(start, min(start + CHUNK, len(loads)))
        for known in (kept[i : i + 16 * CHUNK] for i in range(0, len(kept), 16 * CHUNK)):
            some = some[~_below(loads[known], loads[some]).any(0)]
        mine = loads[some]
        kept = np.concatenate([kept, some[~np.triu(_below(mine, mine), 1).any(0)]])
    return kept


def _below(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    found = some[:, None, 0] <= others[None, :, 0]
    for k in range(1, some.shape[1]):
        found &= some[:, None, k] <= others[None, :, k]
    return found
