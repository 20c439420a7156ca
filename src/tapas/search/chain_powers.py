"""A chain of equal copies as one: its tables by repeated squaring in the min-plus semiring, and its choices again.

Two halves of a chain are joined by eliminating what is between them, so a chain of a thousand takes ten joins.
"""

from collections.abc import Iterator, Sequence

from tapas.search.contraction import Contraction, contract
from tapas.search.cost_tables import Table, sum_by_scope
from tapas.search.run_length import adjacent_pairs, concatenate_runs

ExportRuns = tuple[tuple[tuple[int, ...], int], ...]  # what copies export, and how many in a row do


class ChainPowers:
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
        self.powers: dict[int, list[Table]] = {1: sum_by_scope(alone)}
        self.joins: dict[int, Contraction] = {}
        self.decoded: dict[tuple[int, tuple[int, ...]], ExportRuns] = {}

    def tables(self, length: int) -> list[Table]:
        """The tables of a chain over the ports of its first copy and the exports of its last."""
        if length not in self.powers:
            self.joins[length] = join = self._join(self.tables(length // 2), self.tables(length - length // 2))
            self.powers[length] = sum_by_scope(join.tables)
        return self.powers[length]

    def _join(self, left: list[Table], right: list[Table]) -> Contraction:
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

    def decode(
        self, length: int, ports: tuple[int, ...], last: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """What copies export and read, and how many in a row do, given what the first reads and the last exports."""
        runs = self._export_runs(length, (*ports, *last))
        yield runs[0][0], ports, 1
        for before, own, times in adjacent_pairs(runs):
            yield own, self._read(ports, before), times

    def _read(self, ports: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
        """What a copy reads, given what the first one reads and what the copy before exports."""
        return tuple(ports[i] if v is None else before[self.place[v] - self.ports] for i, v in enumerate(self.feeds))

    def _export_runs(self, length: int, ends: tuple[int, ...]) -> ExportRuns:
        """What copies export, given what the first reads and the last exports."""
        if length == 1:
            return ((ends[self.ports :], 1),)
        key = length, ends
        if key not in self.decoded:
            choices = self.joins[length].decode(dict(enumerate(ends)))
            width = len(self.sizes)
            between = tuple(choices[width + e] for e in range(len(self.exports)))
            inputs = self._read(ends, between)
            half = length // 2
            left = self._export_runs(half, (*ends[: self.ports], *between))
            right = self._export_runs(length - half, (*inputs, *ends[self.ports :]))
            self.decoded[key] = concatenate_runs(left, right)
        return self.decoded[key]
