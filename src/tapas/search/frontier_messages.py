"""What the rest of a network costs at least, seen from between two copies and from within a block.

Copies are gone through in order. Between two of them stand the exported variables of earlier copies that later
ones still read: the frontier. Messages over the frontier, from the front and from the back, bound every plan
that is given in part. Where a table gets too large the message is a lower bound and not the minimum: still valid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tapas.search.chains import CopyVariable
from tapas.search.contraction import Memo, contract
from tapas.search.cost_tables import Table, diagonal_table, sum_by_scope, table
from tapas.search.network import Network

BUDGET = 200_000  # entries of the largest table of a message


@dataclass
class FrontierIndex:
    """The exported variables of all copies, numbered; which of them are still to be read before each copy."""

    network: Network
    exported: list[list[int]] = field(init=False)
    sizes: dict[int, int] = field(init=False)
    names: list[dict[int, int]] = field(init=False)  # per copy: its ports and exports -> number
    frontier: list[tuple[int, ...]] = field(init=False)  # before each copy, and after the last

    def __post_init__(self) -> None:
        network, copies = self.network, self.network.copies
        exported: list[set[int]] = [set() for _ in network.blocks]
        last_reader: dict[CopyVariable, int] = {}
        for c, copy in enumerate(copies):
            for source, v in copy.ports:
                exported[copies[source].block].add(v)
                last_reader[source, v] = c
        self.exported = [sorted(variables) for variables in exported]
        places = [(c, v) for c, copy in enumerate(copies) for v in self.exported[copy.block]]
        number = {place: i for i, place in enumerate(places)}
        self.sizes = {i: network.blocks[copies[c].block].sizes[v] for (c, v), i in number.items()}
        self.names, self.frontier = [], [()]
        alive: set[int] = set()
        last_read: list[set[int]] = [set() for _ in copies]
        for place, c in last_reader.items():
            last_read[c].add(number[place])
        for c, copy in enumerate(copies):
            block = network.blocks[copy.block]
            exports = {v: number[c, v] for v in self.exported[copy.block]}
            self.names.append(exports | {block.own + i: number[place] for i, place in enumerate(copy.ports)})
            alive |= {number[c, v] for v in exports if (c, v) in last_reader}
            alive -= last_read[c]
            self.frontier.append(tuple(sorted(alive)))

    def boundary(self, block: int) -> list[int]:
        """The variables of a block that others see: its ports, then its exports."""
        part = self.network.blocks[block]
        return [*range(part.own, len(part.sizes)), *self.exported[block]]


@dataclass
class FrontierMessages:
    """The messages of a network, to and fro."""

    index: FrontierIndex
    network: Network
    budget: int = BUDGET
    block_tables: list[list[Table]] = field(init=False)  # per block, over its ports and exports
    forward: list[list[Table]] = field(init=False)  # over each frontier: all copies before it
    backward: list[list[Table]] = field(init=False)  # over each frontier: all copies after it

    def __post_init__(self) -> None:
        network, index, memo = self.network, self.index, Memo()
        self.block_tables = []
        for b, block in enumerate(network.blocks):
            sizes = dict(enumerate(block.sizes))
            left = contract(block.tables, sizes, index.boundary(b), self.budget, limit=np.inf)
            self.block_tables.append(sum_by_scope(left.tables))
        count = len(network.copies)
        self.forward, self.backward = [[] for _ in range(count + 1)], [[] for _ in range(count + 1)]
        for c in range(count):
            tables = [*self.forward[c], *self._copy_tables(c)]
            self.forward[c + 1] = self._project(tables, index.frontier[c + 1], memo)
        for c in reversed(range(count)):
            tables = [*self.backward[c + 1], *self._copy_tables(c)]
            self.backward[c] = self._project(tables, index.frontier[c], memo)

    def _copy_tables(self, c: int) -> list[Table]:
        names = self.index.names[c]
        tables: list[Table] = []
        for t in self.block_tables[self.network.copies[c].block]:
            scope = tuple(names[v] for v in t.scope)
            tables.append(t.on(scope) if len(set(scope)) == len(scope) else diagonal_table(scope, t.array))
        return tables

    def _project(self, tables: list[Table], keep: Sequence[int], memo: Memo) -> list[Table]:
        """The least that tables add up to, over the kept variables. They are numbered by their places here, so that
        copies which read alike share the order of elimination."""
        place: dict[int, int] = {}
        local = [t.on(tuple([place.setdefault(v, len(place)) for v in t.scope])) for t in tables]
        kept = [place.setdefault(v, len(place)) for v in keep]
        numbers = list(place)
        sizes = {i: self.index.sizes[v] for i, v in enumerate(numbers)}
        left = contract(local, sizes, kept, self.budget, memo, limit=np.inf).tables
        return sum_by_scope([t.on(tuple([numbers[i] for i in t.scope])) for t in left])

    @property
    def lower_bound(self) -> float:
        return float(sum(t.array for t in self.forward[-1]))

    def outside(self, block: int) -> list[Table]:
        """What all but one copy costs at least, whichever copy of this block that is: over its ports and exports."""
        boundary = self.index.boundary(block)
        shape = tuple(self.network.blocks[block].sizes[v] for v in boundary)
        dense = prod(shape) <= self.budget
        best = np.full(shape if dense else (), np.inf)
        for c, copy in enumerate(self.network.copies):
            if copy.block == block:
                names = [self.index.names[c][v] for v in boundary] if dense else []
                keep = tuple(dict.fromkeys(names))
                left = self._project([*self.forward[c], *self.backward[c + 1]], keep, Memo())
                best = np.minimum(best, _dense_sum(left, names, best.shape))
        return [table(boundary if dense else (), best)]


def _dense_sum(tables: Sequence[Table], names: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """Tables added up over all `names`; where one is named twice, both have to choose the same."""
    index = np.indices(shape, sparse=True)
    place: dict[int, int] = {}
    total = np.zeros(shape)
    for i, name in enumerate(names):
        if place.setdefault(name, i) != i:
            total = np.where(index[i] == index[place[name]], total, np.inf)
    for t in tables:
        total = total + t.array[tuple(index[place[v]] for v in t.scope)]
    return total
