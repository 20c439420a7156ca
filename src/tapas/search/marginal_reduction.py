"""Rule out choices that no best plan can take, by min-marginals of the whole network, copy by copy.

Where contraction is not exact its min-marginals are lower bounds, tighter than dual bounds, but dearer. What is ruled
out makes tables smaller and so the next bounds tighter: it pays to do it again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tapas.search.chains import CopyVariable
from tapas.search.cost_tables import Table, diagonal_table
from tapas.search.dual_reduction import MARGIN, ReducedNetwork
from tapas.search.elimination_order import elimination_order
from tapas.search.min_marginals import min_marginals
from tapas.search.network import BlockVariable, Network, common_domains, restricted_network

VARIABLES = 2_000  # of all copies: with more even the order of elimination takes long
WORK = 300_000_000  # additions: some seconds


@dataclass(frozen=True)
class MarginalBounds:
    """What a plan costs at least that makes a choice in some copy, for all of them."""

    network: Network
    least: Mapping[CopyVariable, np.ndarray]

    @property
    def bound(self) -> float:
        """Of all plans: each makes some choice of every variable."""
        return max((float(mine.min()) for mine in self.least.values()), default=-np.inf)

    def below(self, ceiling: float) -> ReducedNetwork:
        """The network without the choices that are not part of a plan which costs less."""
        allowed: dict[BlockVariable, np.ndarray] = {}
        for (c, v), mine in self.least.items():
            variable, most = (self.network.copies[c].block, v), max(ceiling + MARGIN * abs(ceiling), float(mine.min()))
            allowed[variable] = allowed.get(variable, False) | (mine <= most)
        domains = common_domains(self.network, allowed)
        return ReducedNetwork(restricted_network(self.network, domains), domains, self.bound, None)


def marginal_bounds(network: Network, budget: int) -> MarginalBounds | None:
    """As far as tables with `budget` entries tell; None where that would take too long.

    >>> from tapas.search import BlockCopy, BlockNetwork, table
    >>> block = BlockNetwork((3,), 1, (table((0,), np.array([1.0, 2.0, 9.0])),))
    >>> bounds = marginal_bounds(Network((block,), [BlockCopy(0, ())] * 2), 100)
    >>> bounds.bound, bounds.below(4.0).domains[0, 0].tolist()
    (2.0, [0, 1])
    """
    own = [sum(size > 1 for size in block.sizes[: block.own]) for block in network.blocks]
    if sum(own[copy.block] for copy in network.copies) > VARIABLES:
        return None
    tables, sizes, number = _unfolded(network)
    if _work(tables, sizes, budget) > WORK:
        return None
    least = min_marginals(tables, sizes, budget)
    return MarginalBounds(network, {place: least[i] for place, i in number.items()})


def _unfolded(network: Network) -> tuple[list[Table], dict[int, int], dict[CopyVariable, int]]:
    """The tables of all copies, the sizes of their variables, and the variables' numbers."""
    number: dict[CopyVariable, int] = {}
    sizes: dict[int, int] = {}
    tables: list[Table] = []
    for c, copy in enumerate(network.copies):
        block = network.blocks[copy.block]
        for v in range(block.own):
            number[c, v] = len(number)
            sizes[number[c, v]] = block.sizes[v]
        names = [number[c, v] for v in range(block.own)] + [number[place] for place in copy.ports]
        for t in block.tables:
            scope = tuple([names[v] for v in t.scope])
            tables.append(t.on(scope) if len({*scope}) == len(scope) else diagonal_table(scope, t.array))
    return tables, sizes, number


def _work(tables: list[Table], sizes: dict[int, int], budget: int) -> int:
    large = {v: size for v, size in sizes.items() if size > 1}
    scopes = tuple([tuple([v for v in t.scope if v in large]) for t in tables])
    order = elimination_order(scopes, tuple(large.items()), frozenset[int](), budget)
    return sum(bucket.work for step in order for bucket in step.buckets)
