"""Plans whose copies of a block all do the same: what they cost and need, and the best of them at prices for memory.

There are few variables, one for each of a block and none for its copies; and a price is only one more of them, that
is never eliminated: so one contraction finds the best plans at many prices.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tapas.cost.memory import CopiesAt
from tapas.planner.memory import MemoryModel, Moment, Peak
from tapas.problem.problem import Problem, Rows
from tapas.search import (
    Choices,
    Network,
    Table,
    align_to_scope,
    contract,
    coordinate_descent,
    cost_of,
    diagonal_table,
    quotient_network,
    sum_by_scope,
    table,
    topology_of,
)

PRICE = -1  # the variable
BUDGET = 1_000_000  # entries of a table, for all prices together


class TiedPlans:
    def __init__(self, problem: Problem, rows: Rows, families: Sequence[Sequence[int]]) -> None:
        self.problem, self.rows, self.families = problem, rows, families
        self.count = problem.copies

    @cached_property
    def network(self) -> Network:
        return self.problem.network(self.rows)

    @cached_property
    def memory(self) -> MemoryModel:
        return MemoryModel(self.problem)

    def cost(self, choices: Choices) -> float:
        return cost_of(self.network, choices)

    def wide(self, choices: Choices) -> Choices:
        """By the numbers of the whole tables."""
        return self.problem.widened(choices, self.rows) if self.rows else choices

    def needed(self, choices: Choices) -> Peak:
        return self.memory.needed(self.wide(choices), self.families)

    # -- the best at prices ------------------------------------------------------------------------

    @cached_property
    def tied_costs(self) -> "_TiedCosts":
        return _TiedCosts.of(self.network)

    def best(self, prices: Sequence[float], load: Sequence[Table]) -> list[tuple[float, Choices]]:
        """The plan that is best at each price of what the load adds up, and what it costs."""
        return self._solved(self.tied_costs.costs, prices, load)

    def frugal(self, load: Sequence[Table]) -> tuple[float, Choices]:
        """The plan with the least load, whatever it costs; what cannot be done still cannot."""
        walls = [table(t.scope, np.where(np.isinf(t.array), np.inf, 0.0)) for t in self.tied_costs.costs]
        return self._solved(walls, [1.0], load)[0]

    def _solved(
        self, costs: Sequence[Table], prices: Sequence[float], load: Sequence[Table]
    ) -> list[tuple[float, Choices]]:
        sizes, price = self.tied_costs.sizes, PRICE
        tables = {t.scope: t for t in costs}
        for t in load:
            known, more = tables.get(t.scope), np.multiply.outer(np.array(prices), t.array)
            tables[t.scope] = table((price, *t.scope), more if known is None else more + known.array)
        found = contract(tables.values(), sizes | {price: len(prices)}, (price,), BUDGET, limit=np.inf)
        chosen = found.decode_all({price: np.arange(len(prices))})
        if not found.exact:
            chosen = self._descended(list(tables.values()), chosen)
        paid = np.full(len(prices), self.tied_costs.always)
        for t in self.tied_costs.costs:
            paid += t.array[tuple([chosen[v] for v in t.scope])]
        own = {v: choices.tolist() for v, choices in chosen.items()}
        plans = [self._choices({v: choices[number] for v, choices in own.items()}) for number in range(len(prices))]
        return list(zip(paid.tolist(), plans, strict=True))

    def _descended(self, tables: Sequence[Table], chosen: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """The same, improved one variable at a time."""
        sizes, found = self.tied_costs.sizes, []
        for number in range(len(chosen[PRICE])):
            here = [_at(t, number) for t in tables]
            found.append(coordinate_descent(here, sizes, {v: int(chosen[v][number]) for v in sizes}))
        return {v: np.array([mine[v] for mine in found]) for v in sizes}

    def _choices(self, chosen: dict[int, int]) -> Choices:
        index = self.tied_costs.index
        own = {
            b: tuple(chosen.get(index[b, v], 0) for v in range(block.own))
            for b, block in enumerate(self.network.blocks)
        }
        return topology_of(self.network.copies).spread_over_copies(own)

    # -- memory ------------------------------------------------------------------------------------

    def load(self, moment: Moment) -> list[Table]:
        """The bytes at a moment; but for what is the same for all plans."""
        index = self.tied_costs.index
        found = []
        for b, block in enumerate(self.memory.blocks):
            own, left = len(block.part.variables), self.problem.rows_of(b, self.rows)
            for t in block.tables(self._copies(b, moment), left):
                if t.array.size == 1:
                    continue
                inner = all(v < own for v in t.scope)
                for bound, times in [((), 1)] if inner else self.wirings[b].items():
                    whose = [index[b, v] if v < own else index[bound[v - own]] for v in t.scope]
                    found.append(diagonal_table(whose, t.array if inner else t.array * (times / self.count[b])))
        return _varying(found, self.tied_costs.sizes)

    @cached_property
    def wirings(self) -> dict[int, Counter[tuple]]:
        """By block: the variables that its ports are bound to, and in how many copies."""
        found: dict[int, Counter[tuple]] = defaultdict(Counter)
        for (block, places), times in topology_of(self.problem.wiring).read_patterns.items():
            found[block][places] += times
        return found

    def _copies(self, block: int, moment: Moment) -> CopiesAt:
        if moment.copy is None:
            return CopiesAt(after=self.count[block])
        earlier = [
            s for s in topology_of(self.problem.wiring).copy_ranges if s.block == block and s.first < moment.copy
        ]
        before = sum([min(s.times, moment.copy - s.first) for s in earlier])
        if self.problem.wiring[moment.copy].block != block:
            return CopiesAt(before, None, self.count[block] - before)
        return CopiesAt(before, moment.place, self.count[block] - before - 1)


@dataclass(frozen=True, slots=True)
class _TiedCosts:
    """The variables that have several choices: what they cost."""

    costs: list[Table]
    always: float  # what the others cost
    sizes: dict[int, int]
    index: dict[tuple[int, int], int]  # the number of each variable of each block

    @staticmethod
    def of(network: Network) -> "_TiedCosts":
        count = topology_of(network.copies).copy_counts
        always, blocks = 0.0, []
        for b, block in enumerate(network.blocks):
            some = tuple([t for t in block.tables if t.array.size > 1])
            always += count[b] * sum([t.array.item() for t in block.tables if t.array.size == 1])
            blocks.append(replace(block, tables=some))
        tables, sizes, index = quotient_network(Network(tuple(blocks), network.copies))
        sizes = {v: size for v, size in sizes.items() if size > 1}
        return _TiedCosts(_absorbed(_varying(tables, sizes)), always, sizes, index)


def _varying(tables: Iterable[Table], sizes: Mapping[int, int]) -> list[Table]:
    """Tables over variables with several choices, one for each set of them."""
    found = []
    for t in tables:
        gone = tuple(i for i, v in enumerate(t.scope) if v not in sizes)
        if len(gone) < len(t.scope):
            scope = tuple(v for v in t.scope if v in sizes)
            found.append(table(scope, t.array.squeeze(gone)) if gone else t)
    return sum_by_scope(found)


def _absorbed(tables: Sequence[Table]) -> list[Table]:
    """Fewer tables: what a variable costs by itself is part of another table that has it."""
    hosts: dict[int, Table] = {}
    alone: dict[int, Table] = {}
    for t in tables:
        if len(t.scope) == 1:
            alone[t.scope[0]] = t
            continue
        for v in t.scope:
            if v not in hosts or t.array.size < hosts[v].array.size:
                hosts[v] = t
    more: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for v in alone:
        if v in hosts:
            more[hosts[v].scope].append(v)
    found = [t for v, t in alone.items() if v not in hosts]
    for t in tables:
        if len(t.scope) > 1:
            array = t.array
            for v in more.get(t.scope, ()):
                array = array + align_to_scope(alone[v], t.scope)
            found.append(table(t.scope, array))
    return found


def _at(t: Table, price: int) -> Table:
    return table(t.scope[1:], t.array[price]) if t.scope[0] == PRICE else t
