"""What is said of many copies at once is what looking at them one by one tells."""

from collections import Counter
from itertools import groupby, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tapas.ir.patterns import container, containers, spans
from tapas.search import BlockCopy, LazyCopies
from tapas.search.chains import SHORTEST
from tapas.search.repeats import counted, neighbours
from tapas.search.runs import choice_runs
from tapas.search.wiring import Topology, topology_of
from tests.properties import examples

MANY = settings(max_examples=examples(300), deadline=None, derandomize=True)
EXPORTS = ((5, 3), (4, 6), (2, 7))  # of three blocks


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
        if stop - start >= SHORTEST:
            found.append((start, stop - start))
        start = stop
    return found


def same_ports(copies: tuple[BlockCopy, ...]) -> tuple[BlockCopy, ...]:
    """The first copy reads nothing: it is of a block of its own."""
    return (BlockCopy(3, ()), *copies[1:])


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
def test_wires_are_wired_as_the_copies_they_are_made_of(found: tuple[BlockCopy, ...]) -> None:
    wires = LazyCopies(same_ports(found), (*EXPORTS, (8, 9)))
    plain = Topology(tuple(wires))
    assert [wires[c] for c in range(len(wires))] == list(plain.copies)
    assert topology_of(wires).chains == plain.chains
    assert topology_of(wires).read_patterns == plain.read_patterns
    assert topology_of(wires).exported == plain.exported


@MANY
@given(wirings(), st.data())
def test_runs(found: tuple[BlockCopy, ...], data: st.DataObject) -> None:
    copies, plans = same_ports(found), [(0, 0), (1, 0), (1, 1)]
    choices = tuple(data.draw(st.lists(st.sampled_from(plans), min_size=len(copies), max_size=len(copies))))
    each = [
        (copy.block, own, tuple(choices[c][v] for c, v in copy.ports))
        for copy, own in zip(copies, choices, strict=True)
    ]
    assert [(r.block, r.own, r.ports) for r in choice_runs(copies, choices) for _ in range(r.times)] == each
    assert choice_runs(copies, choices) is choice_runs(copies, choices)


@MANY
@given(st.lists(st.integers(0, 1), min_size=1))
def test_repeats(items: list[int]) -> None:
    assert [item for item, times in counted(items) for _ in range(times)] == items
    pairs = [(before, item, len(list(same))) for (before, item), same in groupby(pairwise(items))]
    assert list(neighbours(counted(items))) == pairs


def test_names_of_many() -> None:
    for paths in (
        ["h.3", "h.4", "h.5"],
        ["h.0", "h.2"],
        ["h.0", "g"],
        ["layer1", "layer2"],
        ["0", "1"],
        ["h.01"],
        [""],
    ):
        assert containers(paths) == [container(path) for path in paths]
    assert container("model.layers.12") == ("model.layers", 12)
    assert container("layer3") == ("layer", 3)
    assert container("7") == ("", 7)
    assert container("model.norm") is None
    assert [spans(numbers) for numbers in ([4], [2, 0, 1], [0, 3, 4, 5], [])] == ["4", "0-2", "0,3-5", ""]
