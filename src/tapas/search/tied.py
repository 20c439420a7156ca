"""Plans in which all copies of a block choose the same: the quotient of the network, and its best plan."""

from collections.abc import Sequence

import numpy as np

from tapas.search.contraction import contract
from tapas.search.cost_tables import Table, diagonal_table
from tapas.search.network import BlockVariable, Network
from tapas.search.run_length import Choices, count_choices
from tapas.search.topology import topology_of


def copies_alike(network: Network, choices: Choices) -> bool:
    return len(count_choices(network.copies, choices)) == len(network.blocks)


def tie_to_most_common(network: Network, choices: Choices) -> Choices:
    """All copies of a block as most of them are."""
    counts = count_choices(network.copies, choices)
    winner = {block: own for (block, own), _ in reversed(counts.most_common())}
    return topology_of(network.copies).spread_over_copies(winner)


def quotient_network(network: Network) -> tuple[list[Table], dict[int, int], dict[BlockVariable, int]]:
    """One variable per block and own variable, every table counted once per copy: tables, sizes, and the number of
    each variable."""
    index = {variable: number for number, variable in enumerate(network.own_variables)}
    sizes = {number: network.blocks[b].sizes[v] for (b, v), number in index.items()}
    topology = topology_of(network.copies)
    tables: list[Table] = []
    for b, block in enumerate(network.blocks):
        here = [(ports, times) for (which, ports), times in topology.read_patterns.items() if which == b]
        for t in block.tables:
            if all(v < block.own for v in t.scope):
                tables.append(diagonal_table([index[b, v] for v in t.scope], t.array * topology.copy_counts[b]))
                continue
            for ports, times in here:
                scope = [index[b, v] if v < block.own else index[ports[v - block.own]] for v in t.scope]
                tables.append(diagonal_table(scope, t.array * times))
    return tables, sizes, index


def solve_tied(network: Network, budget: int, limit: float) -> Choices:
    tables, sizes, index = quotient_network(network)
    contraction = contract(tables, sizes, budget=budget, limit=limit)
    best = contraction.decode({})
    if not contraction.exact:
        best = coordinate_descent(tables, sizes, best)
    own = {b: tuple([best[index[b, v]] for v in range(block.own)]) for b, block in enumerate(network.blocks)}
    return topology_of(network.copies).spread_over_copies(own)


def coordinate_descent(tables: Sequence[Table], sizes: dict[int, int], choices: dict[int, int]) -> dict[int, int]:
    """Improve an assignment one variable at a time until nothing helps.

    >>> from tapas.search.cost_tables import table
    >>> coordinate_descent([table((0,), np.array([2.0, 1.0]))], {0: 2}, {0: 0})
    {0: 1}
    """
    tables_of: dict[int, list[Table]] = {v: [] for v in sizes}
    for t in tables:
        for v in t.scope:
            tables_of[v].append(t)
    best = dict(choices)
    improved = True
    while improved:
        improved = False
        for variable, mine in tables_of.items():
            costs = np.zeros(sizes[variable])
            for t in mine:
                costs = costs + t.array[tuple(slice(None) if v == variable else best[v] for v in t.scope)]
            cheapest = int(np.argmin(costs))
            if costs[cheapest] < costs[best[variable]] - 1e-15:
                best[variable], improved = cheapest, True
    return best
