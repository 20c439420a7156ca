"""Dead-end elimination: choices that another one replaces at no greater cost, whatever the others choose.

Choice j of a variable is a dead end if some choice i has, added up over its tables, max(cost of i - cost of j) <= 0
(Goldstein's criterion). Comparing all pairs is dear for variables with many choices, and they hardly have any dead
ends; those with few are worth it: without a limit on memory nobody computes again what could be kept, and a
variable like that, which most tables of a block look at, makes all of them larger.
"""

from collections.abc import Sequence

import numpy as np

from tapas.search.cost_tables import Table, sum_by_scope, table
from tapas.search.monitor import checkpoint
from tapas.search.network import BlockNetwork, Domains, Network, restricted_network
from tapas.search.topology import topology_of

FEW = 8  # choices
STRIDE = 9  # one entry in so many of each dim is looked at first


def without_dead_ends(network: Network) -> tuple[Network, Domains]:
    """The network without them, and the choices that are left. Variables that other copies read keep all.

    >>> from tapas.search import BlockCopy
    >>> pair = table((0, 1), np.array([[1.0, 2.0], [1.0, 3.0]]))
    >>> fewer, left = without_dead_ends(Network((BlockNetwork((2, 2), 2, (pair,)),), [BlockCopy(0, ())]))
    >>> left[0, 0].tolist(), left[0, 1].tolist()
    ([0], [0])
    """
    exported = topology_of(network.copies).exported
    domains: dict[tuple[int, int], np.ndarray] = {}
    for b, block in enumerate(network.blocks):
        for v, size in enumerate(block.sizes[: block.own]):
            some = 1 < size <= FEW and v not in exported[b]
            domains[b, v] = _alive(block, v) if some else np.arange(size)
    if all(len(domains[b, v]) == network.blocks[b].sizes[v] for b, v in network.own_variables):
        return network, domains
    fewer = restricted_network(network, domains)
    return Network(tuple(map(_squeezed, fewer.blocks)), network.copies), domains


def _alive(block: BlockNetwork, variable: int) -> np.ndarray:
    """One choice after the other: of two that replace each other one has to stay. A look at some entries tells for
    most pairs that neither replaces the other."""
    costs = [np.moveaxis(t.array, t.scope.index(variable), 0) for t in block.tables if variable in t.scope]
    some = [array[:, *[slice(None, None, STRIDE)] * (array.ndim - 1)] for array in costs]
    size = block.sizes[variable]
    alive = np.ones(size, bool)
    for j in range(size):
        checkpoint()
        others = [i for i in np.flatnonzero(alive).tolist() if i != j]
        alive[j] = not any(_replaces(i, j, some) and _replaces(i, j, costs) for i in others)
    return np.flatnonzero(alive)


def _replaces(i: int, j: int, costs: Sequence[np.ndarray]) -> bool:
    """Whether i costs no more than j, whatever the others choose."""
    return sum(_excess(array[i], array[j]) for array in costs) <= 0  # infinite both ways: not a number, so no


def _excess(one: np.ndarray, other: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        most = float((one - other).max())
        if most == most:
            return most
        differences = one - other  # where both are impossible, it is no matter which
        return float(np.where(np.isnan(differences), -np.inf, differences).max())


def _squeezed(block: BlockNetwork) -> BlockNetwork:
    """Its tables without own variables that have one choice; those over the same variables added up."""
    tables: list[Table] = []
    for t in block.tables:
        single = [i for i, v in enumerate(t.scope) if block.sizes[v] == 1 and v < block.own]
        scope = tuple([v for v in t.scope if block.sizes[v] > 1 or v >= block.own])
        tables.append(table(scope, t.array.squeeze(tuple(single))) if single else t)
    return BlockNetwork(block.sizes, block.own, tuple(sum_by_scope(tables)))
