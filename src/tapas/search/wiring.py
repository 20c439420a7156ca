"""Copies of blocks, and what their wiring tells whatever their tables are: what is read of them, and which form a
chain. Copies of a chain are alike, so few of them are looked at one by one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

from tapas.search.chains import Chain, CopyRange, Place, Reader, find_chains
from tapas.search.wires import LazyCopies

REMEMBERED = 8  # wirings: those of a problem, and of the smaller ones that it is made of while it is solved

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Topology:
    copies: Sequence[Reader]

    @cached_property
    def copy_ranges(self) -> list[CopyRange]:
        found, first = [], 0
        for block, same in groupby(map(attrgetter("block"), self.copies)):
            times = len(list(same))
            found.append(CopyRange(block, first, times))
            first += times
        return found

    @cached_property
    def copy_counts(self) -> Counter[int]:
        """How many copies there are of each block."""
        found: Counter[int] = Counter()
        for block, _, times in self.copy_ranges:
            found[block] += times
        return found

    def spread_over_copies(self, of_block: Mapping[int, T]) -> tuple[T, ...]:
        """What there is for each block, for each copy."""
        found: list[T] = []
        for block, _, times in self.copy_ranges:
            found += [of_block[block]] * times
        return tuple(found)

    @cached_property
    def chains(self) -> list[Chain]:
        return find_chains(self.copies, self.copy_ranges)

    @cached_property
    def unchained(self) -> list[int]:
        """Copies that are in no chain."""
        ends = [0, *(end for chain in self.chains for end in (chain.first, chain.stop)), len(self.copies)]
        return [c for start, stop in zip(ends[::2], ends[1::2], strict=True) for c in range(start, stop)]

    @cached_property
    def representatives(self) -> list[tuple[int, int]]:
        """Copies, in order, and how many stand for each: in a chain the second reads as all do that come after."""
        found = [(c, 1) for c in self.unchained]
        for chain in self.chains:
            found += [(chain.first, 1), (chain.first + 1, chain.length - 1)]
        return sorted(found)

    @cached_property
    def exported(self) -> dict[int, tuple[int, ...]]:
        """By block, its variables that other copies read."""
        found: dict[int, set[int]] = {block: set() for block in self.copy_counts}
        for c, _ in self.representatives:
            for source, v in self.copies[c].ports:
                found[self.copies[source].block].add(v)
        return {b: tuple(sorted(variables)) for b, variables in found.items()}

    @cached_property
    def read_patterns(self) -> Counter[tuple[int, tuple[Place, ...]]]:
        """How many copies of a block read what, by block and variable."""
        copies, found = self.copies, Counter[tuple[int, tuple[Place, ...]]]()
        for c, times in self.representatives:
            found[copies[c].block, tuple([(copies[source].block, v) for source, v in copies[c].ports])] += times
        return found

    @cached_property
    def reader_counts(self) -> Counter[Place]:
        """How many ports read a place, of those that the examples read."""
        found: Counter[Place] = Counter()
        for c, times in self.representatives:
            for place in self.copies[c].ports:
                found[place] += 1 if place[0] == c - 1 else times  # in a chain, the one before is read by one only
        return found


@dataclass(frozen=True, eq=False)
class _Rewired(Topology):
    """The wiring of wires: that of the copies they are made of, by other numbers."""

    @cached_property
    def _wires(self) -> LazyCopies:
        assert isinstance(self.copies, LazyCopies)
        return self.copies

    @cached_property
    def copy_ranges(self) -> list[CopyRange]:
        return topology_of(self._wires.readers).copy_ranges

    @cached_property
    def chains(self) -> list[Chain]:
        readers, exports = self._wires.readers, self._wires.exports
        found = []
        for chain in topology_of(readers).chains:
            own = exports[readers[chain.first].block]
            found.append(replace(chain, feeds=tuple([None if e is None else own[e] for e in chain.feeds])))
        return found


_latest: list[Topology] = []


def topology_of(copies: Sequence[Reader]) -> Topology:
    """Searches of one problem differ in tables only: their wiring is looked at once."""
    for known in _latest:
        if known.copies is copies:
            return known
    _latest.insert(0, _Rewired(copies) if isinstance(copies, LazyCopies) else Topology(copies))
    del _latest[REMEMBERED:]
    return _latest[0]
