"""Plans whose copies are free to differ: a lower bound for all of them, and the plan that attains it.

Blocks are contracted to tables over what they read and export, chains of them by repeated squaring; what is left
is a network over the exports of few copies.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from tapas.search.chain_powers import ChainPowers
from tapas.search.chains import Chain, CopyVariable
from tapas.search.contraction import Contraction, Memo, contract
from tapas.search.cost_tables import Table, diagonal_table
from tapas.search.network import Network
from tapas.search.run_length import Choices
from tapas.search.topology import Topology, topology_of

# by block, exports and ports of a copy its choices: most copies find the same around them and are decoded once
Decoded = dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class UntiedPlan:
    bound: float  # of the cost of any plan
    choices: Choices  # the plan that the contraction suggests
    exact: bool  # it costs no more than the bound


def solve_untied(network: Network, budget: int, limit: float) -> UntiedPlan:
    """Lower bound over all plans, copies free to differ; and the plan that the contraction suggests."""
    parts = _Parts(network, budget, limit)
    numbers, sizes, tables = _outer_network(parts)
    outer = contract(tables, sizes, budget=budget, memo=Memo(), limit=limit)
    best = outer.decode({})
    choices = _decode(parts, {place: best[n] for place, n in numbers.items()})
    exact = outer.exact and all(c.exact for c in (*parts.blocks, *(powers for _, powers in parts.chains.values())))
    return UntiedPlan(outer.value, choices, exact)


@dataclass
class _Parts:
    """The blocks and the chains of a network, contracted."""

    network: Network
    budget: int
    limit: float
    decoded: Decoded = field(default_factory=Decoded)

    @cached_property
    def topology(self) -> Topology:
        return topology_of(self.network.copies)

    @cached_property
    def blocks(self) -> list[Contraction]:
        """Each block over its ports and exports."""
        contracted: list[Contraction] = []
        for b, block in enumerate(self.network.blocks):
            keep = {*self.topology.exported[b], *range(block.own, len(block.sizes))}
            sizes = dict(enumerate(block.sizes))
            contracted.append(contract(block.tables, sizes, keep, self.budget, limit=self.limit))
        return contracted

    @cached_property
    def chains(self) -> dict[int, tuple[Chain, ChainPowers]]:
        """Chains by the numbers of their last copies; those of one block share their powers."""
        shared: dict[tuple[int, tuple[int | None, ...]], ChainPowers] = {}
        ends: dict[int, tuple[Chain, ChainPowers]] = {}
        for chain in self.topology.chains:
            b = self.network.copies[chain.first].block
            block, key = self.network.blocks[b], (b, chain.feeds)
            if key not in shared:
                tables, exports = self.blocks[b].tables, self.topology.exported[b]
                shared[key] = ChainPowers(tables, block.sizes, exports, block.own, chain.feeds, self.budget, self.limit)
            ends[chain.stop - 1] = chain, shared[key]
        return ends

    def decode(self, b: int, own: tuple[int, ...], ports: tuple[int, ...]) -> tuple[int, ...]:
        """The choices of a copy, given what it exports and reads."""
        if (b, own, ports) not in self.decoded:
            first = self.network.blocks[b].own
            given = (*self.topology.exported[b], *range(first, first + len(ports)))
            full = self.blocks[b].decode(dict(zip(given, (*own, *ports), strict=True)))
            self.decoded[b, own, ports] = tuple(full[v] for v in range(first))
        return self.decoded[b, own, ports]


def _outer_network(parts: _Parts) -> tuple[dict[CopyVariable, int], dict[int, int], list[Table]]:
    """The network over exports: their numbers, their sizes, and the tables. A chain speaks for its copies, all but
    the last."""
    network, exported = parts.network, parts.topology.exported
    numbers: dict[CopyVariable, int] = {}
    fresh = count()
    tables: list[Table] = []
    sizes: dict[int, int] = {}
    for c in sorted((*parts.topology.unchained, *parts.chains)):
        copy = network.copies[c]
        block = network.blocks[copy.block]
        for v in exported[copy.block]:
            numbers[c, v] = next(fresh)
            sizes[numbers[c, v]] = block.sizes[v]
        if c in parts.chains:
            chain, powers = parts.chains[c]
            own, mine = [numbers[c, v] for v in exported[copy.block]], powers.tables(chain.length)
            names = dict(enumerate((*(numbers[place] for place in network.copies[chain.first].ports), *own)))
        else:
            mine = parts.blocks[copy.block].tables
            names = {v: numbers[c, v] for v in exported[copy.block]}
            names |= {block.own + i: numbers[place] for i, place in enumerate(copy.ports)}
        for t in mine:
            scope = tuple(names[v] for v in t.scope)
            # two ports may be bound to one variable in some copies: then only the diagonal counts
            tables.append(t.on(scope) if len(set(scope)) == len(scope) else diagonal_table(scope, t.array))
    return numbers, sizes, tables


def _decode(parts: _Parts, exports: dict[CopyVariable, int]) -> Choices:
    """The choices of all copies, given what those of the outer network export."""
    network, exported = parts.network, parts.topology.exported
    choices: list[tuple[int, ...]] = [()] * len(network.copies)
    for c in parts.topology.unchained:
        copy = network.copies[c]
        own = tuple(exports[c, v] for v in exported[copy.block])
        choices[c] = parts.decode(copy.block, own, tuple(exports[place] for place in copy.ports))
    for end, (chain, powers) in parts.chains.items():
        b, c = network.copies[end].block, chain.first
        ports = tuple(exports[place] for place in network.copies[c].ports)
        for own, read, times in powers.decode(chain.length, ports, tuple(exports[end, v] for v in exported[b])):
            choices[c : c + times] = [parts.decode(b, own, read)] * times
            c += times
    return tuple(choices)
