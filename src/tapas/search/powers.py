"""A chain of equal copies as one: its tables by repeated squaring, and its choices again.

Copies form a chain if each reads of the one before, always the same of it, and of others only what all of
them read; and if nobody else reads of any but the last. Two halves of a chain are joined by eliminating what
is between them, so a chain of a thousand takes ten joins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tapas.search.contract import Contraction, contract
from tapas.search.network import Copy, Network, Place
from tapas.search.tables import Table, added

SHORTEST = 4


@dataclass(frozen=True)
class Chain:
    first: int  # number of its first copy
    length: int
    feeds: tuple[int | None, ...]  # for each port the variable of the copy before; None if all read the same place


_latest: list[tuple[Any, list[Chain]]] = []


def chains(network: Network) -> list[Chain]:
    """Searches of one problem differ in tables only: their wiring is looked at once."""
    if not _latest or _latest[0][0] is not network.copies:
        _latest[:] = [(network.copies, _chains(network.copies))]
    return _latest[0][1]


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


class Powers:
    """Chains of one block, of any length. Variables: its ports, then what it exports."""

    def __init__(
        self, tables: Sequence[Table], sizes: Sequence[int], exports: Sequence[int], own: int,
        feeds: tuple[int | None, ...], budget: int, limit: float,
    ) -> None:  # fmt: skip
        self.feeds, self.exports, self.budget, self.limit = feeds, tuple(exports), budget, limit
        self.ports = len(feeds)
        self.place = {own + i: i for i in range(self.ports)} | {v: self.ports + e for e, v in enumerate(exports)}
        self.sizes = [*sizes[own:], *(sizes[v] for v in exports)]
        alone = [t.on(tuple(self.place[v] for v in t.scope)) for t in tables]
        self.tables: dict[int, list[Table]] = {1: added(alone)}
        self.joins: dict[int, Contraction] = {}
        self.known: dict[tuple, tuple[tuple[int, ...], ...]] = {}

    def of(self, length: int) -> list[Table]:
        """The tables of a chain over the ports of its first copy and the exports of its last."""
        if length not in self.tables:
            self.joins[length] = join = self._joined(self.of(length // 2), self.of(length - length // 2))
            self.tables[length] = added(join.tables)
        return self.tables[length]

    def _joined(self, left: list[Table], right: list[Table]) -> Contraction:
        width = len(self.sizes)
        middle = {self.ports + e: width + e for e in range(len(self.exports))}
        fed = {i: middle[self.place[v]] for i, v in enumerate(self.feeds) if v is not None}
        tables = [t.on(tuple(middle.get(v, v) for v in t.scope)) for t in left]
        tables += [t.on(tuple(fed.get(v, v) for v in t.scope)) for t in right]
        sizes = dict(enumerate([*self.sizes, *self.sizes[self.ports :]]))
        return contract(tables, sizes, range(width), self.budget, limit=self.limit)

    @property
    def exact(self) -> bool:
        return all(join.exact for join in self.joins.values())

    def decode(self, length: int, ends: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """What each copy exports, given what the first reads and the last exports."""
        if length == 1:
            return (ends[self.ports :],)
        key = length, ends
        if key not in self.known:
            found = self.joins[length].decode(dict(enumerate(ends)))
            width = len(self.sizes)
            between = tuple(found[width + e] for e in range(len(self.exports)))
            inputs = tuple(
                ends[i] if v is None else between[self.place[v] - self.ports] for i, v in enumerate(self.feeds)
            )
            half = length // 2
            self.known[key] = self.decode(half, (*ends[: self.ports], *between)) + self.decode(
                length - half, (*inputs, *ends[self.ports :])
            )
        return self.known[key]
