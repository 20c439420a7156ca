"""A network of repeated blocks. A block is a small min-plus network over its own variables and its *ports*:
variables of earlier copies that it reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from tapas.search.chains import Place
from tapas.search.runs import Choices, choice_runs
from tapas.search.tables import Table, evaluate
from tapas.search.wires import BlockCopy

__all__ = ["BlockCopy", "BlockNetwork", "Choices", "Network", "Place", "cost_of"]


@dataclass(frozen=True)
class BlockNetwork:
    sizes: tuple[int, ...]  # number of choices of each own variable, then of each port
    own: int  # how many of them are own variables
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Network:
    blocks: tuple[BlockNetwork, ...]
    copies: Sequence[BlockCopy]


def cost_of(network: Network, choices: Choices) -> float:
    """The cost of a plan, added up over the whole unfolded network."""
    known: dict[tuple, float] = {}
    total = 0.0
    for run in choice_runs(network.copies, choices):
        key = (run.block, id(run.own), run.ports)  # copies mostly share their choices: there is no need to read them
        if key not in known:
            known[key] = evaluate(network.blocks[run.block].tables, dict(enumerate((*run.own, *run.ports))))
        total += run.times * known[key]
    return total
