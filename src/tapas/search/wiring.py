"""Copies of blocks, and what their wiring tells whatever their tables are: what is read of them, and which form a
chain. Copies of a chain are alike, so few of them are looked at one by one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

from tapas.search.chains import Chain, Place, Reader, Stretch, find_chains
from tapas.search.wires import Wires

REMEMBERED = 8  # wirings: those of a problem, and of the smaller ones that it is made of while it is solved

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Wiring:
    copies: Sequence[Reader]

    @cached_property
    def stretches(self) -> list[Stretch]:
        found, first = [], 0
        for block, same in groupby(map(attrgetter("block"), self.copies)):
            times = len(list(same))
            found.append(Stretch(block, first, times))
            first += times
        return found

    @cached_property
    def count(self) -> Counter[int]:
        """How many copies there are of each block."""
        found: Counter[int] = Counter()
        for block, _, times in self.stretches:
            found[block] += times
        return found

    def spread(self, of_block: Mapping[int, T]) -> tuple[T, ...]:
        """What there is for each block, for each copy."""
        found: list[T] = []
        for block, _, times in self.stretches:
            found += [of_block[block]] * times
        return tuple(found)

    @cached_property
    def chains(self) -> list[Chain]:
        return find_chains(self.copies, self.stretches)

    @cached_property
    def alone(self) -> list[int]:
        """Copies that are in no chain."""
        ends = [0, *(end for chain in self.chains for end in (chain.first, chain.stop)), len(self.copies)]
        return [c for start, stop in zip(ends[::2], ends[1::2], strict=True) for c in range(start, stop)]

    @cached_property
    def examples(self) -> list[tuple[int, int]]:
        """Copies, in order, and how many stand for each: in a chain the second reads as all do that come after."""
        found = [(c, 1) for c in self.alone]
        for chain in self.chains:
            found += [(chain.first, 1), (chain.first + 1, chain.length - 1)]
        return sorted(found)

    @cached_property
    def exported(self) -> dict[int, tuple[int, ...]]:
        """By block, its variables that other copies read."""
        found: dict[int, set[int]] = {block: set() for block in self.count}
        for c, _ in self.examples:
            for source, v in self.copies[c].ports:
                found[self.copies[source].block].add(v)
        return {b: tuple(sorted(variables)) for b, variables in found.items()}

    @cached_property
    def readings(self) -> Counter[tuple[int, tuple[Place, ...]]]:
        """How many copies of a block read what, by block and variable."""
        copies, found = self.copies, Counter[tuple[int, tuple[Place, ...]]]()
        for c, times in self.examples:
            found[copies[c].block, tuple([(copies[source].block, v) for source, v in copies[c].ports])] += times
        return found

    @cached_property
    def readers(self) -> Counter[Place]:
        """How many ports read a place, of those that the examples read."""
        found: Counter[Place] = Counter()
        for c, times in self.examples:
            for place in self.copies[c].ports:
                found[place] += 1 if place[0] == c - 1 else times  # in a chain, the one before is read by one only
        return found


@dataclass(frozen=True, eq=False)
class _Rewired(Wiring):
    """The wiring of wires: that of the copies they are made of, by other numbers."""

    @cached_property
    def _wires(self) -> Wires:
        assert isinstance(self.copies, Wires)
        return self.copies

    @cached_property
    def stretches(self) -> list[Stretch]:
        return wired(self._wires.readers).stretches

    @cached_property
    def chains(self) -> list[Chain]:
        readers, exports = self._wires.readers, self._wires.exports
        found = []
        for chain in wired(readers).chains:
            own = exports[readers[chain.first].block]
            found.append(replace(chain, feeds=tuple([None if e is None else own[e] for e in chain.feeds])))
        return found


_latest: list[Wiring] = []


def wired(copies: Sequence[Reader]) -> Wiring:
    """Searches of one problem differ in tables only: their wiring is looked at once."""
    for known in _latest:
        if known.copies is copies:
            return known
    _latest.insert(0, _Rewired(copies) if isinstance(copies, Wires) else Wiring(copies))
    del _latest[REMEMBERED:]
    return _latest[0]
