"""Random copies of blocks."""

from hypothesis import settings
from hypothesis import strategies as st

from tapas.search import BlockCopy
from tests.properties import examples

MANY = settings(max_examples=examples(300), deadline=None, derandomize=True)


@st.composite
def wirings(draw: st.DrawFn) -> tuple[BlockCopy, ...]:
    """Copies that mostly read as the one before does: the last of all, or what that one reads."""
    copies = [BlockCopy(draw(st.integers(0, 2)), ())]
    reads = [[(draw(st.booleans()), draw(st.integers(0, 1))) for _ in range(1 + block)] for block in range(3)]
    for c in range(1, draw(st.integers(2, 24))):
        block = copies[-1].block if draw(st.integers(0, 7)) else draw(st.integers(0, 2))
        ports = [(c - 1 if chained else 0, e) for chained, e in reads[block]]
        if not draw(st.integers(0, 7)):
            ports[0] = (draw(st.integers(0, c - 1)), draw(st.integers(0, 1)))
        copies.append(BlockCopy(block, tuple(ports)))
    return tuple(copies)


def same_ports(copies: tuple[BlockCopy, ...]) -> tuple[BlockCopy, ...]:
    """The first copy reads nothing: it is of a block of its own."""
    return (BlockCopy(3, ()), *copies[1:])
