"""What the rest of a network costs at least, seen from between two copies and from within a block.

Copies are gone through in order. Between two of them stand the exported variables of earlier copies that later
ones still read: the frontier. Messages over the frontier, from the front and from the back, bound every plan
that is given in part. Where a table gets too large the message is a lower bound and not the minimum: still valid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tapas.search.contract import Memo, contract
from tapas.search.network import Network
from tapas.search.tables import Table, diagonal_table, sum_by_scope, table

BUDGET = 200_000  # entries of the largest table of a message


@dataclass
class Wires:
    """The exported variables of all copies, numbered; which of them are still to be read before each copy."""

    network: Network
    exported: list[list[int]] = field(init=False)
    sizes: dict[int, int] = field(init=False)
    names: list[dict[int, int]] = field(init=False)  # per copy: its ports and exports -> number
    frontier: list[tuple[int, ...]] = field(init=False)  # before each copy, and after the last

    def __post_init__(self) -> None:
        network, copies = self.network, self.network.copies
        places: list[set[int]] = [set() for _ in network.blocks]
        last: dict[tuple[int, int], int] = {}  # place -> the last copy that reads it
        for c, copy in enumerate(copies):
            for source, v in copy.ports:
                places[copies[source].block].add(v)
                last[source, v] = c
        self.exported = [sorted(found) for found in places]
        number = {
            place: i
            for i, place in enumerate((c, v) for c, copy in enumerate(copies) for v in self.exported[copy.block])
        }
        self.sizes = {i: network.blocks[copies[c].block].sizes[v] for (c, v), i in number.items()}
        self.names, self.frontier = [], [()]
        alive: set[int] = set()
        ends: list[list[int]] = [[] for _ in copies]
        for place, c in last.items():
            ends[c].append(number[place])
        for c, copy in enumerate(copies):
            block = network.blocks[copy.block]
            made = {v: number[c, v] for v in self.exported[copy.block]}
            self.names.append(made | {block.own + i: number[place] for i, place in enumerate(copy.ports)})
            alive |= {number[c, v] for v in made if (c, v) in last}
            alive -= set(ends[c])
            self.frontier.append(tuple(sorted(alive)))

    def outward(self, block: int) -> list[int]:
        """The variables of a block that others see: its ports, then its exports."""
        part = self.network.blocks[block]
        return [*range(part.own, len(part.sizes)), *self.exported[block]]


@dataclass
class Around:
    """The messages of a network."""

    wires: Wires
    network: Network
    budget: int = BUDGET
    inner: list[list[Table]] = field(init=False)  # per block, over its ports and exports
    ahead: list[list[Table]] = field(init=False)  # over each frontier: all copies before it
    behind: list[list[Table]] = field(init=False)  # over each frontier: all copies after it

    def __post_init__(self) -> None:
        network, wires, memo = self.network, self.wires, Memo()
        self.inner = []
        for b, block in enumerate(network.blocks):
            sizes = dict(enumerate(block.sizes))
            left = contract(block.tables, sizes, wires.outward(b), self.budget, limit=np.inf)
            self.inner.append(sum_by_scope(left.tables))
        count = len(network.copies)
        self.ahead, self.behind = [[] for _ in range(count + 1)], [[] for _ in range(count + 1)]
        for c in range(count):
            self.ahead[c + 1] = self._passed([*self.ahead[c], *self._of(c)], wires.frontier[c + 1], memo)
        for c in reversed(range(count)):
            self.behind[c] = self._passed([*self.behind[c + 1], *self._of(c)], wires.frontier[c], memo)

    def _of(self, c: int) -> list[Table]:
        names = self.wires.names[c]
        found = []
        for t in self.inner[self.network.copies[c].block]:
            scope = tuple(names[v] for v in t.scope)
            found.append(t.on(scope) if len(set(scope)) == len(scope) else diagonal_table(scope, t.array))
        return found

    def _passed(self, tables: list[Table], keep: Sequence[int], memo: Memo) -> list[Table]:
        sizes = {v: self.wires.sizes[v] for t in tables for v in t.scope} | {v: self.wires.sizes[v] for v in keep}
        return sum_by_scope(contract(tables, sizes, keep, self.budget, memo, limit=np.inf).tables)

    @property
    def least(self) -> float:
        return float(sum(t.array for t in self.ahead[-1]))

    def outside(self, block: int) -> list[Table]:
        """What all but one copy costs at least, whichever copy of this block that is: over its ports and exports."""
        seen = self.wires.outward(block)
        shape = tuple(self.network.blocks[block].sizes[v] for v in seen)
        dense = prod(shape) <= self.budget
        best = np.full(shape if dense else (), np.inf)
        for c, copy in enumerate(self.network.copies):
            if copy.block == block:
                names = [self.wires.names[c][v] for v in seen] if dense else []
                keep = tuple(dict.fromkeys(names))
                left = self._passed([*self.ahead[c], *self.behind[c + 1]], keep, Memo())
                best = np.minimum(best, _spread(left, names, shape) if dense else sum(t.array for t in left))
        return [table(seen if dense else (), best)]


def _spread(tables: Sequence[Table], names: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
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
