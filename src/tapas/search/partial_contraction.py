"""A network with the easy part of every block contracted away: what is left is its core.

Most variables of a block have few neighbours, and are eliminated exactly with small tables. Where that would take
a larger table a variable stays. So the easy part is contracted once, however many bounds, larger tables and fewer
choices are tried on the core; and bounds of the core are tighter than those of the whole.
"""

from dataclasses import dataclass

from tapas.search.contraction import Contraction, contract
from tapas.search.cost_tables import sum_by_scope
from tapas.search.network import BlockNetwork, Network
from tapas.search.run_length import Choices, choice_runs
from tapas.search.topology import topology_of


@dataclass(frozen=True)
class PartialContraction:
    """The core has the variables of the network; those that were eliminated have one choice and no tables."""

    core: Network
    blocks: tuple[Contraction, ...]

    def expanded(self, choices: Choices) -> Choices:
        """A plan of the core with the best choices of what was eliminated."""
        rows: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
        expanded: list[tuple[int, ...]] = []
        for run in choice_runs(self.core.copies, choices):
            key = run.block, run.own, run.ports
            if key not in rows:
                rows[key] = self._expanded_row(*key)
            expanded += [rows[key]] * run.times
        return tuple(expanded)

    def _expanded_row(self, b: int, own: tuple[int, ...], ports: tuple[int, ...]) -> tuple[int, ...]:
        eliminated = {v for v, _ in self.blocks[b].steps}
        complete = self.blocks[b].decode({v: i for v, i in enumerate((*own, *ports)) if v not in eliminated})
        return tuple([complete[v] for v in range(len(own))])


def contract_partially(network: Network, budget: int, limit: float) -> PartialContraction:
    """Eliminate what takes no table with more entries than the budget, and stays within a block.

    >>> import numpy as np
    >>> from tapas.search import BlockCopy, table
    >>> tables = table((0,), np.array([5.0, 1.0])), table((0, 1), np.array([[0.0, 9.0], [2.0, 3.0]]))
    >>> network = Network((BlockNetwork((2, 2), 2, tables),), [BlockCopy(0, ())])
    >>> partly = contract_partially(network, 1000, 1000)
    >>> partly.core.blocks[0].sizes, partly.expanded(((0, 0),))
    ((1, 1), ((1, 0),))
    """
    exported = topology_of(network.copies).exported
    contracted: list[Contraction] = []
    cores: list[BlockNetwork] = []
    for b, block in enumerate(network.blocks):
        boundary = {*exported[b], *range(block.own, len(block.sizes))}
        contraction = contract(block.tables, dict(enumerate(block.sizes)), boundary, budget, limit=limit, easy=True)
        eliminated = {v for v, _ in contraction.steps}
        sizes = tuple([1 if v in eliminated else size for v, size in enumerate(block.sizes)])
        contracted.append(contraction)
        cores.append(BlockNetwork(sizes, block.own, tuple(sum_by_scope(contraction.tables))))
    return PartialContraction(Network(tuple(cores), network.copies), tuple(contracted))
