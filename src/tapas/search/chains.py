"""Which copies form a chain.

They do if each reads of the one before, always the same of it, and of others only what all of them read; and if
nobody else reads of any but the last. Deep models have few chains and many copies: all copies are looked at at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain as concatenated
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np

SHORTEST_CHAIN = 4
CopyVariable = tuple[int, int]  # copy number, variable of its block


class WiredCopy(Protocol):
    """A copy; what it reads may go by any numbers, be they of variables or of exports."""

    @property
    def block(self) -> int: ...
    @property
    def ports(self) -> tuple[CopyVariable, ...]: ...


class CopyRange(NamedTuple):
    """Copies of one block in a row."""

    block: int
    first: int
    times: int


@dataclass(frozen=True, slots=True)
class Chain:
    first: int  # number of its first copy
    length: int
    feeds: tuple[int | None, ...]  # for each port the variable of the copy before; None if all read the same place

    @property
    def stop(self) -> int:
        return self.first + self.length


def find_chains(copies: Sequence[WiredCopy], ranges: Sequence[CopyRange]) -> list[Chain]:
    long = [part for part in ranges if part.times >= SHORTEST_CHAIN]
    if not long:
        return []
    ports = list(map(attrgetter("ports"), copies))
    port_counts = np.fromiter(map(len, ports), np.int64, len(ports))
    start = np.concatenate(([0], np.cumsum(port_counts)))
    flat = concatenated.from_iterable(concatenated.from_iterable(ports))
    places = np.fromiter(flat, np.int64, 2 * start[-1]).reshape(-1, 2)
    handed_on = _read_by_next_only(places[:, 0], port_counts)
    chains: list[Chain] = []
    for _, first, times in long:
        read = places[start[first] : start[first + times]].reshape(times, port_counts[first], 2)
        chains += _chains_in_range(first, read, handed_on[first : first + times - 1])
    return chains


def _read_by_next_only(sources: np.ndarray, port_counts: np.ndarray) -> np.ndarray:
    """Whether a copy is read by the next one only, given what all of them read, and how much each."""
    count = len(port_counts)
    readers = np.repeat(np.arange(count), port_counts)
    earliest, latest = np.full((2, count), -1)
    latest[sources] = readers  # of several the last one stays
    earliest[sources[::-1]] = readers[::-1]
    return (earliest == latest) & (latest == np.arange(1, count + 1))


def _chains_in_range(first: int, places: np.ndarray, handed_on: np.ndarray) -> Iterator[Chain]:
    """The chains among copies in a row, given what each of them reads."""
    before, here = places[:-1], places[1:]
    fed = here[:, :, 0] == np.arange(first, first + len(here))[:, None]
    linked = (fed | (here == before).all(2)).all(1) & handed_on  # to the copy before
    feeds = np.where(fed, here[:, :, 1], -1)
    other = np.concatenate(([False], (feeds[1:] != feeds[:-1]).any(1)))  # than the link before
    start = 0
    for link in (*np.flatnonzero(~linked | other).tolist(), len(here)):
        if link == start and link < len(here) and linked[link]:
            continue  # the first link of a chain is like no other
        if link + 1 - start >= SHORTEST_CHAIN:
            own = tuple([None if v < 0 else v for v in feeds[start].tolist()])
            yield Chain(first + start, link + 1 - start, own)
        start = link + 1
