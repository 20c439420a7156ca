"""Runs of equal items, and of copies that choose the same."""

from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from tapas.search import BlockCopy, choice_runs
from tapas.search.run_length import adjacent_pairs, run_lengths
from tests.search.copies import MANY, same_ports, wirings


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
    assert [item for item, times in run_lengths(items) for _ in range(times)] == items
    pairs = [(before, item, len(list(same))) for (before, item), same in groupby(pairwise(items))]
    assert list(adjacent_pairs(run_lengths(items))) == pairs
