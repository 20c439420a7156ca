"""Sets of moments, as sorted intervals that do not touch: what was under way, and what of it something else covers."""

from collections.abc import Iterable

Intervals = list[tuple[int, int]]


def union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """
    >>> union([(5, 7), (0, 2), (1, 3), (7, 8), (4, 4)])
    [(0, 3), (5, 8)]
    """
    joined: Intervals = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def common(first: Intervals, second: Intervals) -> Intervals:
    """
    >>> common([(0, 3), (5, 8)], [(2, 6), (7, 9)])
    [(2, 3), (5, 6), (7, 8)]
    """
    shared: Intervals = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            shared.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def without(first: Intervals, second: Intervals) -> Intervals:
    """
    >>> without([(0, 3), (5, 8)], [(2, 6), (7, 9)])
    [(0, 2), (6, 7)]
    """
    if not first:
        return []
    start, end = first[0][0], first[-1][1]
    edges = [start, *(edge for interval in common([(start, end)], second) for edge in interval), end]
    return common(first, [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b])


def length(intervals: Intervals) -> int:
    """
    >>> length([(0, 3), (5, 8)])
    6
    """
    return sum(end - start for start, end in intervals)
