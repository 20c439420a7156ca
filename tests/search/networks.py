"""Random networks, and what trying everything finds."""

from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from tapas.search import BlockCopy, BlockNetwork, Network, Table, align_to_scope, diagonal_table, table
from tests.properties import examples

MANY = settings(max_examples=examples(200), deadline=None, derandomize=True)
costs = st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.5, 7.25, 0.125, float("inf")])
finite = st.sampled_from([0.0, 1.0, 2.0, 3.5, 7.25, 0.125])


def arrays(draw: st.DrawFn, shape: tuple[int, ...], entries: st.SearchStrategy[float]) -> np.ndarray:
    count = int(np.prod(shape))
    return np.array(draw(st.lists(entries, min_size=count, max_size=count))).reshape(shape)


@st.composite
def networks(
    draw: st.DrawFn, entries: st.SearchStrategy[float] = costs, largest: int = 3
) -> tuple[list[Table], dict[int, int]]:
    """Any graph, cycles and parallel tables included; tables of up to three variables."""
    sizes = {v: draw(st.integers(1, 4)) for v in range(draw(st.integers(2, 6)))}
    tables = []
    for _ in range(draw(st.integers(0, 8))):
        scope = draw(st.lists(st.sampled_from(sorted(sizes)), min_size=1, max_size=largest, unique=True))
        tables.append(table(scope, arrays(draw, tuple(sizes[v] for v in scope), entries)))
    return tables, sizes


@st.composite
def folded(draw: st.DrawFn, entries: st.SearchStrategy[float] = finite) -> Network:
    """Random blocks; copies whose ports may be bound to any earlier variable of the right size.

    So chains, shared ports, alternating blocks, side outputs, and two ports bound to one variable occur.
    """
    blocks = []
    for number in range(draw(st.integers(1, 3))):
        own = draw(st.integers(1, 3))
        ports = draw(st.integers(0, 2)) if number else 0
        sizes = (2, *(draw(st.integers(1, 3)) for _ in range(own - 1)), *([2] * ports))
        tables = [table((v,), arrays(draw, (sizes[v],), entries)) for v in range(own)]
        pairs = [(u, v) for u in range(len(sizes)) for v in range(len(sizes)) if u != v and min(u, v) < own]
        for _ in range(draw(st.integers(0, 5)) if pairs else 0):
            pair = draw(st.sampled_from(pairs))
            tables.append(table(pair, arrays(draw, (sizes[pair[0]], sizes[pair[1]]), entries)))
        blocks.append(BlockNetwork(sizes, own, tuple(tables)))
    copies = [BlockCopy(0, ())]
    for _ in range(draw(st.integers(0, 4))):
        b = draw(st.integers(0, len(blocks) - 1))
        places = [
            (c, v)
            for c, copy in enumerate(copies)
            for v in range(blocks[copy.block].own)
            if blocks[copy.block].sizes[v] == 2
        ]
        wanted = len(blocks[b].sizes) - blocks[b].own
        copies.append(BlockCopy(b, tuple(draw(st.lists(st.sampled_from(places), min_size=wanted, max_size=wanted)))))
    used = sorted({copy.block for copy in copies})
    return Network(
        tuple(blocks[b] for b in used), tuple(BlockCopy(used.index(copy.block), copy.ports) for copy in copies)
    )


def unfolded(network: Network, alike: bool = False) -> tuple[list[Table], dict[int, int]]:
    """Every copy written out, with variables of its own or (alike) with those of its block."""
    number: dict[tuple[int, int], int] = {}
    sizes: dict[int, int] = {}

    def variable(copy: int, v: int) -> int:
        key = (network.copies[copy].block if alike else copy, v)
        found = number.setdefault(key, len(number))
        sizes[found] = network.blocks[network.copies[copy].block].sizes[v]
        return found

    tables = []
    for c, copy in enumerate(network.copies):
        block = network.blocks[copy.block]
        own = [variable(c, v) for v in range(block.own)]
        names = [*own, *(variable(*place) for place in copy.ports)]
        tables += [diagonal_table([names[v] for v in t.scope], t.array) for t in block.tables]
    return tables, sizes


def brute_force(tables: Sequence[Table], sizes: dict[int, int]) -> float:
    total = np.zeros(tuple(sizes.values()))
    for t in tables:
        total = total + align_to_scope(t, tuple(sizes))
    return float(total.min())
