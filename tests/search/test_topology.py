"""What is said of many copies at once is what looking at them one by one tells."""

from collections import Counter

from hypothesis import given

from tapas.search import BlockCopy, LazyCopies, Topology, topology_of
from tapas.search.chains import SHORTEST_CHAIN
from tests.search.copies import MANY, same_ports, wirings

EXPORTS = ((5, 3), (4, 6), (2, 7))  # of three blocks


def chained(copies: tuple[BlockCopy, ...]) -> list[tuple[int, int]]:
    """First copies and lengths of chains."""
    readers: dict[int, set[int]] = {}
    for c, copy in enumerate(copies):
        for source, _ in copy.ports:
            readers.setdefault(source, set()).add(c)
    found, start = [], 0
    while start < len(copies):
        stop, feeds = start + 1, None
        while stop < len(copies) and copies[stop].block == copies[start].block and readers.get(stop - 1) == {stop}:
            ports = list(zip(copies[stop].ports, copies[stop - 1].ports, strict=True))
            wiring = [place[1] if place[0] == stop - 1 else None for place, _ in ports]
            kept = all(place[0] == stop - 1 or place == before for place, before in ports)
            if not kept or feeds not in (None, wiring):
                break
            feeds, stop = wiring, stop + 1
        if stop - start >= SHORTEST_CHAIN:
            found.append((start, stop - start))
        start = stop
    return found


@MANY
@given(wirings())
def test_wirings(found: tuple[BlockCopy, ...]) -> None:
    copies = same_ports(found)
    wiring = Topology(copies)
    assert [(chain.first, chain.length) for chain in wiring.chains] == chained(copies)
    assert wiring.copy_counts == Counter(copy.block for copy in copies)
    assert wiring.spread_over_copies({b: b for b in range(4)}) == tuple(copy.block for copy in copies)
    each = [(copy.block, tuple((copies[c].block, v) for c, v in copy.ports)) for copy in copies]
    assert wiring.read_patterns == Counter(each)
    assert list(wiring.read_patterns) == list(dict.fromkeys(each))
    read = Counter(place for copy in copies for place in copy.ports)
    assert all(
        wiring.reader_counts[place] == read[place] for c, _ in wiring.representatives for place in copies[c].ports
    )
    exported = {(copies[c].block, v) for c, v in read}
    assert {(b, v) for b, variables in wiring.exported.items() for v in variables} == exported


@MANY
@given(wirings())
def test_lazy_copies_are_wired_as_those_they_are_made_of(found: tuple[BlockCopy, ...]) -> None:
    lazy = LazyCopies(same_ports(found), (*EXPORTS, (8, 9)))
    plain = Topology(tuple(lazy))
    assert [lazy[c] for c in range(len(lazy))] == list(plain.copies)
    assert topology_of(lazy).chains == plain.chains
    assert topology_of(lazy).read_patterns == plain.read_patterns
    assert topology_of(lazy).exported == plain.exported
