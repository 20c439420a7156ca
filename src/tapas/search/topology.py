"""Copies of blocks, and what their wiring tells whatever their tables are: what is read of them, and which form a
chain. Copies of a chain are alike, so few of them are looked at one by one."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, TypeVar, overload

from tapas.search.chains import Chain, CopyRange, CopyVariable, WiredCopy, find_chains

REMEMBERED = 8  # topologies: those of a problem, and of the smaller ones that it is made of while it is solved

T = TypeVar("T")


class BlockCopy(NamedTuple):
    """A copy of a block: its ports are variables of other copies."""

    block: int
    ports: tuple[CopyVariable, ...]


@dataclass(frozen=True, eq=False)
class LazyCopies(Sequence[BlockCopy]):
    """Copies that read exports, as copies that read variables. Of a deep model most are never asked for.

    >>> copies = LazyCopies([BlockCopy(0, ()), BlockCopy(1, ((0, 1),))], exports=[(5, 3), ()])
    >>> copies[1]
    BlockCopy(block=1, ports=((0, 3),))
    """

    readers: Sequence[WiredCopy]
    exports: Sequence[Sequence[int]]  # by block, the variable of each export
    resolved: dict[int, BlockCopy] = field(default_factory=dict[int, BlockCopy], repr=False)

    def _resolve(self, number: int) -> BlockCopy:
        if number not in self.resolved:
            readers, exports = self.readers, self.exports
            block, ports = readers[number].block, readers[number].ports
            self.resolved[number] = BlockCopy(block, tuple([(c, exports[readers[c].block][e]) for c, e in ports]))
        return self.resolved[number]

    @cached_property
    def _all(self) -> tuple[BlockCopy, ...]:
        return tuple(map(self._resolve, range(len(self.readers))))

    @overload
    def __getitem__(self, number: int) -> BlockCopy: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[BlockCopy, ...]: ...
    def __getitem__(self, number: int | slice) -> BlockCopy | tuple[BlockCopy, ...]:
        return self._all[number] if isinstance(number, slice) else self._resolve(number)

    def __iter__(self) -> Iterator[BlockCopy]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self.readers)


@dataclass(frozen=True, eq=False)
class Topology:
    """What the wiring of copies tells.

    >>> layers = [BlockCopy(0, ()), *(BlockCopy(1, ((c, 0),)) for c in range(5))]
    >>> Topology(layers).chains
    [Chain(first=1, length=5, feeds=(0,))]
    """

    copies: Sequence[WiredCopy]

    @cached_property
    def copy_ranges(self) -> list[CopyRange]:
        ranges: list[CopyRange] = []
        first = 0
        for block, same in groupby(map(attrgetter("block"), self.copies)):
            times = len(list(same))
            ranges.append(CopyRange(block, first, times))
            first += times
        return ranges

    @cached_property
    def copy_counts(self) -> Counter[int]:
        """How many copies there are of each block."""
        counts: Counter[int] = Counter()
        for block, _, times in self.copy_ranges:
            counts[block] += times
        return counts

    def spread_over_copies(self, of_block: Mapping[int, T]) -> tuple[T, ...]:
        """What there is for each block, for each copy."""
        spread: list[T] = []
        for block, _, times in self.copy_ranges:
            spread += [of_block[block]] * times
        return tuple(spread)

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
        counted = [(c, 1) for c in self.unchained]
        for chain in self.chains:
            counted += [(chain.first, 1), (chain.first + 1, chain.length - 1)]
        return sorted(counted)

    @cached_property
    def exported(self) -> dict[int, tuple[int, ...]]:
        """By block, its variables that other copies read."""
        exported: dict[int, set[int]] = {block: set() for block in self.copy_counts}
        for c, _ in self.representatives:
            for source, v in self.copies[c].ports:
                exported[self.copies[source].block].add(v)
        return {b: tuple(sorted(variables)) for b, variables in exported.items()}

    @cached_property
    def read_patterns(self) -> Counter[tuple[int, tuple[CopyVariable, ...]]]:
        """How many copies of a block read what, by block and variable."""
        copies, patterns = self.copies, Counter[tuple[int, tuple[CopyVariable, ...]]]()
        for c, times in self.representatives:
            patterns[copies[c].block, tuple([(copies[source].block, v) for source, v in copies[c].ports])] += times
        return patterns

    @cached_property
    def reader_counts(self) -> Counter[CopyVariable]:
        """How many ports read a place, of those that the representatives read."""
        counts: Counter[CopyVariable] = Counter()
        for c, times in self.representatives:
            for place in self.copies[c].ports:
                counts[place] += 1 if place[0] == c - 1 else times  # in a chain, the one before is read by one only
        return counts


@dataclass(frozen=True, eq=False)
class _LazyTopology(Topology):
    """That of the copies which lazy ones are made of, by other numbers."""

    copies: LazyCopies

    @cached_property
    def copy_ranges(self) -> list[CopyRange]:
        return topology_of(self.copies.readers).copy_ranges

    @cached_property
    def chains(self) -> list[Chain]:
        readers, exports = self.copies.readers, self.copies.exports
        chains: list[Chain] = []
        for chain in topology_of(readers).chains:
            own = exports[readers[chain.first].block]
            chains.append(replace(chain, feeds=tuple([None if e is None else own[e] for e in chain.feeds])))
        return chains


_latest: list[Topology] = []


def topology_of(copies: Sequence[WiredCopy]) -> Topology:
    """Searches of one problem differ in tables only: their wiring is looked at once."""
    for topology in _latest:
        if topology.copies is copies:
            return topology
    _latest.insert(0, _LazyTopology(copies) if isinstance(copies, LazyCopies) else Topology(copies))
    del _latest[REMEMBERED:]
    return _latest[0]
