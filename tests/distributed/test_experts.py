"""Tokens sent in buffers of a fixed size, by processes: compiled in one piece, and never dropped."""

import pytest

import tapas
from tapas.errors import TapasError
from tests.distributed.eager_and_compiled import trained
from tests.distributed.parallel import mesh_of
from tests.distributed.pool import Pool
from tests.distributed.small import EAGER, small

DISPATCH = [("*", "[*, dispatch]")]


@pytest.mark.full
def test_compiled_in_one_piece(pool: Pool) -> None:
    for eager, compiled, sent, sent_compiled, breaks in pool(trained, "mixtral", DISPATCH, 2.0):
        assert eager < 1e-6 and compiled < 1e-6  # the router is in float32
        assert sent == sent_compiled and all(("all_to_all", (1,)) in phase for phase in sent)
        assert not breaks, "\n".join(breaks)


def overfilled(rank: int, family: str) -> str:
    """All tokens go to the first expert."""
    model, inputs = small(family)
    options = {"mesh": mesh_of((2, 2)), "cluster": EAGER, "pins": DISPATCH, "capacity": 1.25}
    module = tapas.parallelize(model, inputs, **options)
    try:
        module(**inputs)
    except TapasError as error:
        return str(error)
    return ""


def test_no_token_is_dropped(pool: Pool) -> None:
    """That they do not fit is an error of all ranks, which says of which layer."""
    for said in pool(overfilled, "one_expert"):
        assert said.startswith("model.layers.0.mlp.experts: some rank has more tokens")
        assert "capacity of 1.25" in said
