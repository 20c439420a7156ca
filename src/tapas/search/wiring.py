"""Copies of blocks, and what their wiring tells whatever their tables are: what is read of them, and which form a
chain.

Copies form a chain if each reads of the one before, always the same of it, and of others only what all of
them read; and if nobody else reads of any but the last.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

Place = tuple[int, int]  # copy number, variable of its block
Choices = tuple[tuple[int, ...], ...]  # per copy, the choice of each own variable

SHORTEST = 4
REMEMBERED = 4  # wirings: those of a problem, and of the smaller ones that it is made of while it is solved


class Copy(NamedTuple):
    block: int
    ports: tuple[Place, ...]


@dataclass(frozen=True)
class Chain:
    first: int  # number of its first copy
    length: int
    feeds: tuple[int | None, ...]  # for each port the variable of the copy before; None if all read the same place

    @property
    def stop(self) -> int:
        return self.first + self.length


@dataclass(frozen=True)
class Wiring:
    copies: Sequence[Copy]

    @cached_property
    def chains(self) -> list[Chain]:
        return _chains(self.copies)

    @cached_property
    def alone(self) -> list[int]:
        """Copies that are in no chain."""
        ends = [0, *(end for chain in self.chains for end in (chain.first, chain.stop)), len(self.copies)]
        return [c for start, stop in zip(ends[::2], ends[1::2], strict=True) for c in range(start, stop)]

    @cached_property
    def exported(self) -> dict[int, tuple[int, ...]]:
        """By block, its variables that other copies read."""
        found: dict[int, set[int]] = {copy.block: set() for copy in self.copies}
        for copy in self.copies:
            for c, v in copy.ports:
                found[self.copies[c].block].add(v)
        return {b: tuple(sorted(variables)) for b, variables in found.items()}

    @cached_property
    def readings(self) -> Counter[tuple[int, tuple[Place, ...]]]:
        """How many copies of a block read what, by block and variable."""
        copies = self.copies
        return Counter([(copy.block, tuple([(copies[c].block, v) for c, v in copy.ports])) for copy in copies])


_latest: list[Wiring] = []


def wired(copies: Sequence[Copy]) -> Wiring:
    """Searches of one problem differ in tables only: their wiring is looked at once."""
    for known in _latest:
        if known.copies is copies:
            return known
    _latest.insert(0, Wiring(copies))
    del _latest[REMEMBERED:]
    return _latest[0]


@dataclass(frozen=True, slots=True)
class Run:
    """Copies in a row that choose the same and find the same around them."""

    first: int
    times: int
    block: int
    own: tuple[int, ...]
    ports: tuple[int, ...]


def runs(copies: Sequence[Copy], choices: Sequence[tuple[int, ...]]) -> list[Run]:
    """All copies, in order; those of a chain are only looked at where choices change."""
    return [
        Run(c, times, copies[c].block, choices[c], tuple([choices[source][v] for source, v in copies[c].ports]))
        for c, times in _stretches(wired(copies), choices)
    ]


def tally(copies: Sequence[Copy], choices: Sequence[tuple[int, ...]]) -> Counter[tuple[int, tuple[int, ...]]]:
    """How many copies of a block choose what."""
    found: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for run in runs(copies, choices):
        found[run.block, run.own] += run.times
    return found


def _stretches(wiring: Wiring, choices: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    c = 0
    for chain in wiring.chains:
        yield from ((before, 1) for before in range(c, chain.first + 1))
        c = chain.first + 1
        for _, same in groupby(pairwise(choices[chain.first : chain.stop])):
            times = len(list(same))
            yield c, times
            c += times
    yield from ((after, 1) for after in range(c, len(wiring.copies)))


def _chains(copies: Sequence[Copy]) -> list[Chain]:
    readers: dict[int, set[int]] = {}
    for c, copy in enumerate(copies):
        for source, _ in copy.ports:
            readers.setdefault(source, set()).add(c)
    found, start = [], 0
    while start < len(copies):
        stop, feeds = start + 1, None
        while stop < len(copies) and copies[stop].block == copies[start].block and readers.get(stop - 1) == {stop}:
            wiring = _feeds(copies[stop].ports, copies[stop - 1].ports, stop - 1)
            if wiring is None or (feeds is not None and wiring != feeds):
                break
            feeds, stop = wiring, stop + 1
        if feeds is not None and stop - start >= SHORTEST:
            found.append(Chain(start, stop - start, feeds))
        start = stop
    return found


def _feeds(ports: Sequence[Place], before: Sequence[Place], previous: int) -> tuple[int | None, ...] | None:
    """Which ports are fed by the previous copy; None if some port is neither that nor the previous copy's own."""
    feeds: list[int | None] = []
    for (source, variable), other in zip(ports, before, strict=True):
        if source == previous:
            feeds.append(variable)
        elif (source, variable) == other:
            feeds.append(None)
        else:
            return None
    return tuple(feeds)
