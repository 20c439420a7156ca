"""A chain of equal copies as one: its tables by repeated squaring, and its choices again.

Two halves of a chain are joined by eliminating what is between them, so a chain of a thousand takes ten joins.
"""

from collections.abc import Iterator, Sequence

from tapas.search.contract import Contraction, contract
from tapas.search.repeats import joined, neighbours
from tapas.search.tables import Table, sum_by_scope


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
        self.tables: dict[int, list[Table]] = {1: sum_by_scope(alone)}
        self.joins: dict[int, Contraction] = {}
        self.known: dict[tuple, tuple[tuple[tuple[int, ...], int], ...]] = {}

    def of(self, length: int) -> list[Table]:
        """The tables of a chain over the ports of its first copy and the exports of its last."""
        if length not in self.tables:
            self.joins[length] = join = self._joined(self.of(length // 2), self.of(length - length // 2))
            self.tables[length] = sum_by_scope(join.tables)
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

    def runs(
        self, length: int, ports: tuple[int, ...], last: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """What copies export and read, and how many in a row do, given what the first reads and the last exports."""
        made = self.decode(length, (*ports, *last))
        yield made[0][0], ports, 1
        for before, own, times in neighbours(made):
            yield own, self._read(ports, before), times

    def _read(self, ports: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
        """What a copy reads, given what the first one reads and what the copy before exports."""
        return tuple(ports[i] if v is None else before[self.place[v] - self.ports] for i, v in enumerate(self.feeds))

    def decode(self, length: int, ends: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], int], ...]:
        """What copies export, and how many in a row do, given what the first reads and the last exports."""
        if length == 1:
            return ((ends[self.ports :], 1),)
        key = length, ends
        if key not in self.known:
            found = self.joins[length].decode(dict(enumerate(ends)))
            width = len(self.sizes)
            between = tuple(found[width + e] for e in range(len(self.exports)))
            inputs = self._read(ends, between)
            half = length // 2
            left = self.decode(half, (*ends[: self.ports], *between))
            self.known[key] = joined(left, self.decode(length - half, (*inputs, *ends[self.ports :])))
        return self.known[key]
