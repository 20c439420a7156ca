"""What the wiring of copies tells, whatever their tables are: what is read of them, and which form a chain.

Copies form a chain if each reads of the one before, always the same of it, and of others only what all of
them read; and if nobody else reads of any but the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tapas.search.network import Copy, Network, Place

SHORTEST = 4


@dataclass(frozen=True)
class Chain:
    first: int  # number of its first copy
    length: int
    feeds: tuple[int | None, ...]  # for each port the variable of the copy before; None if all read the same place


@dataclass(frozen=True)
class Wiring:
    chains: list[Chain]
    exported: dict[int, tuple[int, ...]]  # by block, its variables that other copies read


_latest: list[tuple[Any, Wiring]] = []


def wired(network: Network) -> Wiring:
    """Searches of one problem differ in tables only: their wiring is looked at once."""
    if not _latest or _latest[0][0] is not network.copies:
        _latest[:] = [(network.copies, Wiring(_chains(network.copies), _exported(network)))]
    return _latest[0][1]


def _exported(network: Network) -> dict[int, tuple[int, ...]]:
    found: dict[int, set[int]] = {b: set() for b in range(len(network.blocks))}
    for copy in network.copies:
        for c, v in copy.ports:
            found[network.copies[c].block].add(v)
    return {b: tuple(sorted(variables)) for b, variables in found.items()}


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
