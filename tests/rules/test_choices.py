"""The layouts that options ask for: every one of them deals out the whole of its dim."""

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapas.errors import GraphError
from tapas.ir.graph import Ref, Tensor
from tapas.rules.base import Call, rule_for
from tapas.rules.choices import options
from tapas.rules.tiling import Divisibility
from tapas.sharding.layout import S
from tapas.sharding.layout_grid import tensor_grid
from tests.properties import examples


@st.composite
def reshapes(draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of as many elements that have some dims in common: neighbours are merged on either side."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=2, max_size=6))

    def merged() -> tuple[int, ...]:
        ends = draw(st.sets(st.integers(1, len(sizes) - 1)))
        cuts = [0, *sorted(ends), len(sizes)]
        return tuple(prod(sizes[a:b]) for a, b in pairwise(cuts))

    return merged(), merged()


@settings(max_examples=examples(400), deadline=None)
@given(reshapes(), st.sampled_from([(2,), (3,), (8,), (2, 2), (5, 3), (4, 2)]))
def test_a_reshape_has_layouts_that_cover_their_dims(shapes, mesh):
    before, after = (Tensor(name, shape, "float32", True) for name, shape in zip("xy", shapes, strict=True))
    call = Call("aten.reshape.default", (Ref(0), after.shape), (), (before,), (after,))
    for option in options(rule_for(call), call, {}, Divisibility(mesh)):
        for tensor, state in zip((before, after), (*option.operands, *option.results), strict=True):
            if state.sharded:
                covered = sum(length for length, _ in state.tiling) if state.tiling else tensor.shape[state.dim]
                assert covered == tensor.shape[state.dim], option


def test_a_minor_factor_is_dealt_out_in_its_units():
    before, after = Tensor("x", (4, 5, 3, 2, 32), "float32", True), Tensor("y", (4, 30, 32), "float32", True)
    call = Call("aten.reshape.default", (Ref(0), after.shape), (), (before,), (after,))
    found = {option.results[0] for option in options(rule_for(call), call, {}, Divisibility((8,)))}
    assert S(1, ((30, 2),)) in found


@pytest.mark.parametrize("tiling", [((6, 2),), ((15, 1), (16, 1)), ((30, 4),)])
def test_a_state_that_does_not_cover_its_dim_is_refused(tiling):
    with pytest.raises(GraphError, match="does not cover the 30 elements"):
        tensor_grid((4, 30), (S(1, tiling),), (2,))
