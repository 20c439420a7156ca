"""A network with fewer choices, and the way back to the choices it came from."""

from collections.abc import Mapping

import numpy as np

from tapas.search.network import BlockNetwork, Choices, Network
from tapas.search.tables import Table, table

Own = tuple[int, int]  # block, own variable
Rows = Mapping[tuple[int, int], np.ndarray]  # by block and variable, own or port: the choices that are left


def agreed(network: Network, left: Mapping[Own, np.ndarray]) -> dict[Own, np.ndarray]:
    """The choices marked in `left`; the same for all variables that one port may stand for."""
    home: dict[Own, Own] = {(b, v): (b, v) for b, block in enumerate(network.blocks) for v in range(block.own)}

    def find(x: Own) -> Own:
        while home[x] != x:
            x = home[x]
        return x

    ports: dict[tuple[int, int], Own] = {}
    for copy in network.copies:
        for i, (c, v) in enumerate(copy.ports):
            source = network.copies[c].block, v
            home[find(source)] = find(ports.setdefault((copy.block, i), source))
    joint: dict[Own, np.ndarray] = {}
    for place in home:
        joint[find(place)] = joint.get(find(place), False) | left[place]
    return {place: np.flatnonzero(joint[find(place)]) for place in home}


def with_ports(network: Network, kept: Mapping[Own, np.ndarray]) -> dict[tuple[int, int], np.ndarray]:
    """What is left of each own variable, and so of each port."""
    rows = dict(kept)
    for copy in network.copies:
        own = network.blocks[copy.block].own
        rows |= {(copy.block, own + i): kept[network.copies[c].block, v] for i, (c, v) in enumerate(copy.ports)}
    return rows


def restricted(network: Network, kept: Mapping[Own, np.ndarray]) -> Network:
    """The network with only the kept choices."""
    rows = with_ports(network, kept)
    blocks = []
    for b, block in enumerate(network.blocks):
        tables = [_cut(t, [rows[b, v] for v in t.scope]) for t in block.tables]
        blocks.append(BlockNetwork(tuple(len(rows[b, v]) for v in range(len(block.sizes))), block.own, tuple(tables)))
    return Network(tuple(blocks), network.copies)


def _cut(t: Table, rows: list[np.ndarray]) -> Table:
    return table(t.scope, t.array[np.ix_(*rows)]) if t.scope else t


def original(network: Network, kept: Mapping[Own, np.ndarray], choices: Choices) -> Choices:
    """A plan of the restricted network in the choices of the network it came from."""
    return tuple(
        tuple(int(kept[copy.block, v][choice]) for v, choice in enumerate(own))
        for copy, own in zip(network.copies, choices, strict=True)
    )
