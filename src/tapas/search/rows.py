"""What blocks do in plans that are known: rows of choices, one of each kind, and the domains that they span."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tapas.search.network import Domains, Network, common_domains
from tapas.search.run_length import Choices, count_choices


@dataclass(frozen=True, eq=False)
class KnownRows:
    domains: Domains  # the choices that some copy of a block makes in some plan
    rows: list[np.ndarray]  # per block, [row, own variable], by numbers in the domains


def known_rows(network: Network, plans: Iterable[Choices]) -> KnownRows:
    """
    >>> from tapas.search import BlockCopy, BlockNetwork
    >>> network = Network((BlockNetwork((5,), 1, ()),), [BlockCopy(0, ()), BlockCopy(0, ())])
    >>> known = known_rows(network, [((1,), (4,)), ((4,), (4,))])
    >>> known.domains[0, 0].tolist(), known.rows[0].tolist()
    ([1, 4], [[0], [1]])
    """
    pairs = dict.fromkeys(pair for choices in plans for pair in count_choices(network.copies, choices))
    rows: list[list[tuple[int, ...]]] = [[] for _ in network.blocks]
    allowed = {(b, v): np.zeros(network.blocks[b].sizes[v], bool) for b, v in network.own_variables}
    for block, own in pairs:
        rows[block].append(own)
        for v, choice in enumerate(own):
            allowed[block, v][choice] = True
    domains = common_domains(network, allowed)
    numbered: list[np.ndarray] = []
    for b, own in enumerate(map(np.array, rows)):
        columns = [np.searchsorted(domains[b, v], own[:, v]) for v in range(own.shape[1])]
        numbered.append(np.stack(columns, axis=1))
    return KnownRows(domains, numbered)
