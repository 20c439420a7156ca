"""A network of repeated blocks, and the same with fewer choices. A block is a small min-plus network over its own
variables and its *ports*: variables of earlier copies that it reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tapas.search.cost_tables import Table, evaluate, table
from tapas.search.run_length import Choices, choice_runs
from tapas.search.topology import BlockCopy

BlockVariable = tuple[int, int]  # block, its variable
Domains = Mapping[BlockVariable, np.ndarray]  # the choices that are left


@dataclass(frozen=True)
class BlockNetwork:
    sizes: tuple[int, ...]  # number of choices of each own variable, then of each port
    own: int  # how many of them are own variables
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Network:
    blocks: tuple[BlockNetwork, ...]
    copies: Sequence[BlockCopy]

    @property
    def own_variables(self) -> list[BlockVariable]:
        return [(b, v) for b, block in enumerate(self.blocks) for v in range(block.own)]


def cost_of(network: Network, choices: Choices) -> float:
    """The cost of a plan, added up over the whole unfolded network.

    >>> block = BlockNetwork((2,), 1, (table((0,), np.array([3.0, 4.0])),))
    >>> cost_of(Network((block,), [BlockCopy(0, ()), BlockCopy(0, ())]), ((0,), (1,)))
    7.0
    """
    costs: dict[tuple[int, int, tuple[int, ...]], float] = {}
    total = 0.0
    for run in choice_runs(network.copies, choices):
        key = (run.block, id(run.own), run.ports)  # copies mostly share their choices: there is no need to read them
        if key not in costs:
            costs[key] = evaluate(network.blocks[run.block].tables, dict(enumerate((*run.own, *run.ports))))
        total += run.times * costs[key]
    return total


# -- fewer choices -------------------------------------------------------------------------------------


def common_domains(network: Network, allowed: Mapping[BlockVariable, np.ndarray]) -> dict[BlockVariable, np.ndarray]:
    """The choices marked in `allowed`; the same for all variables that one port may stand for (union-find)."""
    parent = {variable: variable for variable in network.own_variables}

    def root(x: BlockVariable) -> BlockVariable:
        while parent[x] != x:
            x = parent[x]
        return x

    ports: dict[BlockVariable, BlockVariable] = {}
    for copy in network.copies:
        for i, (c, v) in enumerate(copy.ports):
            source = network.copies[c].block, v
            parent[root(source)] = root(ports.setdefault((copy.block, i), source))
    joint: dict[BlockVariable, np.ndarray] = {}
    for variable in parent:
        joint[root(variable)] = joint.get(root(variable), False) | allowed[variable]
    return {variable: np.flatnonzero(joint[root(variable)]) for variable in parent}


def domains_with_ports(network: Network, domains: Domains) -> dict[BlockVariable, np.ndarray]:
    """What is left of each own variable, and so of each port."""
    complete = dict(domains)
    for copy in network.copies:
        own = network.blocks[copy.block].own
        complete |= {(copy.block, own + i): domains[network.copies[c].block, v] for i, (c, v) in enumerate(copy.ports)}
    return complete


def restricted_network(network: Network, domains: Domains) -> Network:
    """The network with only the choices that are left."""
    complete = domains_with_ports(network, domains)
    blocks: list[BlockNetwork] = []
    for b, block in enumerate(network.blocks):
        tables = [_restricted_table(t, [complete[b, v] for v in t.scope]) for t in block.tables]
        sizes = tuple(len(complete[b, v]) for v in range(len(block.sizes)))
        blocks.append(BlockNetwork(sizes, block.own, tuple(tables)))
    return Network(tuple(blocks), network.copies)


def _restricted_table(t: Table, rows: list[np.ndarray]) -> Table:
    return table(t.scope, t.array[np.ix_(*rows)]) if t.scope else t


def original_choices(network: Network, domains: Domains, choices: Choices) -> Choices:
    """A plan of the restricted network in the choices of the network it came from. Equal rows stay one object."""
    rows: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    for block, own in dict.fromkeys(zip([copy.block for copy in network.copies], choices, strict=True)):
        rows[block, own] = tuple([int(domains[block, v][choice]) for v, choice in enumerate(own)])
    return tuple([rows[copy.block, own] for copy, own in zip(network.copies, choices, strict=True)])
