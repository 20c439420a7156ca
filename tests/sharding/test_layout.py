"""States and what ranks hold: every element is somewhere, and only once."""

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tapas.sharding.layout import (
    B,
    P,
    R,
    S,
    State,
    Tiling,
    extent,
    local_elements,
    local_pieces,
    local_shape,
    parse_state,
    pieces,
    split_of,
)  # fmt: skip
from tests.properties import examples

MANY = settings(max_examples=examples(300), deadline=None, derandomize=True)
axes_sizes = st.lists(st.integers(1, 4), min_size=0, max_size=3)


@st.composite
def tilings(draw: st.DrawFn) -> Tiling:
    """Segments of whole units, any lengths."""
    segments = []
    for _ in range(draw(st.integers(1, 4))):
        unit = draw(st.integers(1, 5))
        segments.append((unit * draw(st.integers(1, 9)), unit))
    return tuple(segments)


states = st.one_of(
    st.sampled_from([R, B, P]),
    st.builds(S, st.integers(0, 5)),
    st.builds(S, st.integers(0, 5), tilings()),
)


def ranks(sizes: list[int]) -> list[tuple[int, ...]]:
    return list(product(*(range(n) for n in sizes)))


@MANY
@given(tilings(), axes_sizes)
def test_pieces_cover_a_dim_exactly_once(tiling: Tiling, axes: list[int]) -> None:
    size = sum(length for length, _ in tiling)
    held = sorted(r for coord in ranks(axes) for r in pieces(size, tiling, axes, coord) if r[0] < r[1])
    elements = [i for start, stop in held for i in range(start, stop)]
    assert elements == list(range(size))


@MANY
@given(tilings(), axes_sizes)
def test_no_unit_is_cut(tiling: Tiling, axes: list[int]) -> None:
    size, cuts, offset = sum(length for length, _ in tiling), set(), 0
    for length, unit in tiling:
        cuts |= set(range(offset, offset + length + 1, unit))
        offset += length
    for coord in ranks(axes):
        assert all({start, stop} <= cuts for start, stop in pieces(size, tiling, axes, coord))


@MANY
@given(tilings(), axes_sizes)
def test_extent_is_the_largest_share(tiling: Tiling, axes: list[int]) -> None:
    size = sum(length for length, _ in tiling)
    shares = [sum(b - a for a, b in pieces(size, tiling, axes, coord)) for coord in ranks(axes)]
    assert extent(size, tiling, axes) == max(shares)
    assert sum(shares) == size


@MANY
@given(st.integers(1, 60), st.integers(1, 8))
def test_plain_split_is_that_of_chunk(size: int, n: int) -> None:
    chunks = [len(c) for c in torch.arange(size).chunk(n)]
    shares = [stop - start for ((start, stop),) in (pieces(size, (), [n], [i]) for i in range(n))]
    assert shares == chunks + [0] * (n - len(chunks))


@MANY
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_local_pieces_hold_a_tensor_once_for_each_whole_axis(shape: list[int], data: st.DataObject) -> None:
    mesh = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dims = st.integers(0, len(shape) - 1).map(S)
    layout = tuple(data.draw(st.one_of(st.sampled_from([R, B, P]), dims)) for _ in mesh)
    counts = torch.zeros(shape)
    for coord in ranks(mesh):
        held = local_pieces(shape, layout, mesh, coord)
        counts[tuple(slice(*ranges[0]) for ranges in held)] += 1
        assert prod(local_shape(shape, layout, mesh, coord)) <= local_elements(shape, layout, mesh)
    whole = prod(n for n, state in zip(mesh, layout, strict=True) if not state.sharded)
    assert (counts == whole).all()


@MANY
@given(states)
def test_text_round_trip(state: State) -> None:
    assert parse_state(str(state)) == State(state.kind, state.dim, state.tiling)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (R, "R"),
        (S(1), "S(1)"),
        (S(0, ((1600, 64),) * 3), "S(0|3x1600/64)"),
        (S(2, ((8, 1), (8, 1), (4, 2))), "S(2|2x8+4/2)"),
    ],
)
def test_text(state: State, text: str) -> None:
    assert str(state) == text
    assert parse_state(text) == state


@pytest.mark.parametrize("text", ["", "Q", "S", "S(1", "S(x)", "r"])
def test_not_a_state(text: str) -> None:
    with pytest.raises(ValueError):
        parse_state(text)


def test_layouts_read_outermost_first() -> None:
    layout = (S(0), R, S(0))
    assert split_of(layout, 0) == ((0, 2), ())
    assert split_of(layout, 1) == ((), ())
    # the outer axis takes halves, the inner one halves of these
    assert local_pieces((8,), layout, (2, 3, 2), (1, 0, 0)) == (((4, 6),),)


def test_adjoints() -> None:
    """R and S are their own adjoints, B and P each other's."""
    assert [(s.value, s.gradient) for s in (R, B, P)] == [(R, R), (R, P), (P, R)]
    assert S(3).value == S(3).gradient == S(3)
