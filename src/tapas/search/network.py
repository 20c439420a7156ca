"""A network of repeated blocks. A block is a small min-plus network over its own variables and its *ports*:
variables of earlier copies that it reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from tapas.search.tables import Table, evaluate

Place = tuple[int, int]  # copy number, variable of its block
Choices = tuple[tuple[int, ...], ...]  # per copy, the choice of each own variable


@dataclass(frozen=True)
class Block:
    sizes: tuple[int, ...]  # number of choices of each own variable, then of each port
    own: int  # how many of them are own variables
    tables: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    block: int
    ports: tuple[Place, ...]


@dataclass(frozen=True)
class Network:
    blocks: tuple[Block, ...]
    copies: tuple[Copy, ...]


def cost_of(network: Network, choices: Sequence[Sequence[int]]) -> float:
    """The cost of a plan, added up copy by copy over the whole unfolded network."""
    known: dict[tuple, float] = {}
    total = 0.0
    for copy, own in zip(network.copies, choices, strict=True):
        ports = tuple([choices[c][v] for c, v in copy.ports])
        key = (copy.block, id(own), ports)  # copies mostly share their choices: there is no need to read them all
        if key not in known:
            known[key] = evaluate(network.blocks[copy.block].tables, dict(enumerate((*own, *ports))))
        total += known[key]
    return total
