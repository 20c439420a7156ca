"""Plans whose copies of a block are all alike: what they cost and need, and the best of them at prices for memory.

There are few variables, one for each of a block and none for its copies; and a price is only one more of them, that
is never eliminated: so one contraction finds the best plans at many prices.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from tapas.amounts import ALWAYS, Amount, BlockMemory
from tapas.memory import Memory, Moment, Peak
from tapas.problem import KEEP, ModeVariable, Problem, Rows
from tapas.search import Network, Table, cost_of, table
from tapas.search.contract import contract
from tapas.search.folded import descend, tied_network
from tapas.search.network import Choices
from tapas.search.tables import added, tied

BUDGET = 1_000_000  # entries of a table, for all prices together

Turns = tuple[int, int | None, int]  # copies of a block before a moment, the place of the one at its turn, copies after


class Alike:
    def __init__(self, problem: Problem, rows: Rows, families: Sequence[Sequence[int]]) -> None:
        self.problem, self.rows, self.families = problem, rows, families
        self.count = Counter(copy.block for copy in problem.wiring)

    @cached_property
    def network(self) -> Network:
        return self.problem.network(self.rows)

    @cached_property
    def memory(self) -> Memory:
        return Memory(self.problem)

    def cost(self, choices: Choices) -> float:
        return cost_of(self.network, choices)

    def wide(self, choices: Choices) -> Choices:
        """By the numbers of the whole tables."""
        return self.problem.widened(choices, self.rows)

    def needed(self, choices: Choices) -> Peak:
        return self.memory.needed(self.wide(choices), self.families)

    # -- the best at prices ------------------------------------------------------------------------

    @cached_property
    def tied(self) -> tuple[list[Table], dict[int, int], dict[tuple[int, int], int]]:
        """Costs; how many choices there are; the number of each variable of each block."""
        tables, sizes, index = tied_network(self.network)
        return added(tables), sizes, index

    def best(self, prices: Sequence[float], load: Sequence[Table]) -> list[Choices]:
        """The plan that is best at each price of what the load adds up."""
        return self._solved(self.tied[0], prices, load)

    def frugal(self, load: Sequence[Table]) -> Choices:
        """The plan with the least load, whatever it costs; what cannot be done still cannot."""
        walls = [table(t.scope, np.where(np.isinf(t.array), np.inf, 0.0)) for t in self.tied[0]]
        return self._solved(walls, [1.0], load)[0]

    def _solved(self, tables: Sequence[Table], prices: Sequence[float], load: Sequence[Table]) -> list[Choices]:
        sizes = self.tied[1]
        price = len(sizes)
        priced = [table((price, *t.scope), np.multiply.outer(np.array(prices), t.array)) for t in load]
        found = contract([*tables, *priced], sizes | {price: len(prices)}, (price,), BUDGET, limit=np.inf)
        plans = []
        for number in range(len(prices)):
            chosen = found.decode({price: number})
            if not found.exact:
                here = [*tables, *(_at(t, number) for t in priced)]
                chosen = descend(here, sizes, {v: chosen[v] for v in sizes})
            plans.append(self._choices(chosen))
        return plans

    def _choices(self, chosen: dict[int, int]) -> Choices:
        index = self.tied[2]
        own = [tuple(chosen[index[b, v]] for v in range(block.own)) for b, block in enumerate(self.network.blocks)]
        return tuple(own[copy.block] for copy in self.network.copies)

    # -- memory ------------------------------------------------------------------------------------

    def load(self, moment: Moment) -> list[Table]:
        """The bytes at a moment; but for what is the same for all plans."""
        index, wirings = (
            self.tied[2],
            Counter(
                (copy.block, tuple((self.problem.wiring[c].block, v) for c, v in copy.ports))
                for copy in self.problem.wiring
            ),
        )
        found = []
        for b, block in enumerate(self.memory.blocks):
            own, left = len(block.part.variables), self.problem.rows_of(b, self.rows)
            ports = [(ports, times / self.count[b]) for (which, ports), times in wirings.items() if which == b]
            for t in added(_amounts(block, self._turns(b, moment), left)):
                inner = all(v < own for v in t.scope)
                for bound, share in [((), 1.0)] if inner else ports:
                    scope = [index[b, v] if v < own else index[bound[v - own]] for v in t.scope]
                    found.append(tied(scope, t.array * share))
        return added(found)

    def _turns(self, block: int, moment: Moment) -> Turns:
        if moment.copy is None:
            return 0, None, self.count[block]
        before = sum(copy.block == block for copy in self.problem.wiring[: moment.copy])
        if self.problem.wiring[moment.copy].block != block:
            return before, None, self.count[block] - before
        return before, moment.place, self.count[block] - before - 1


def _amounts(block: BlockMemory, turns: Turns, rows: Sequence[np.ndarray | None]) -> Iterator[Table]:
    part = block.part
    modes: Sequence[str] = (KEEP,)
    if part.mode is not None:
        variable, left = part.variables[part.mode], rows[part.mode]
        assert isinstance(variable, ModeVariable)
        modes = variable.modes if left is None else [variable.modes[i] for i in left]
    for amount in block.amounts:
        times = _times(amount, turns, modes)
        if not any(times):
            continue
        nbytes = amount.nbytes
        if any(rows[v] is not None for v in amount.scope):
            cut = (
                np.arange(n) if (r := rows[v]) is None else r for v, n in zip(amount.scope, nbytes.shape, strict=True)
            )
            nbytes = nbytes[np.ix_(*cut)]
        if part.mode is None or len(set(times)) == 1:
            yield table(amount.scope, nbytes * times[0])
        else:
            yield table((part.mode, *amount.scope), np.multiply.outer(np.array(times, float), nbytes))


def _times(amount: Amount, turns: Turns, modes: Sequence[str]) -> list[int]:
    """How many times an amount is there at a moment, in each mode: see `BlockMemory.tables`."""
    before, place, after = turns
    if amount.place == ALWAYS:
        once = before + (place is not None) + after
    elif amount.kind == "gradients":
        once = after + (place is not None and amount.place > place)
    elif amount.kind == "working":
        once = int(amount.place == place)
    else:
        now = place is not None and amount.place <= place and KEEP in amount.modes
        return [before * (mode in amount.modes) + now for mode in modes]
    return [once] * len(modes)


def _at(t: Table, price: int) -> Table:
    return table(t.scope[1:], t.array[price])
