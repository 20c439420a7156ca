"""Tokens sent in buffers of a fixed size, by processes: compiled in one piece, and never dropped."""

import warnings

import pytest
import torch

import tapas
from tapas.errors import TapasError
from tapas.runtime.module import executor_of
from tests.distributed.parallel import mesh_of, parallel_of
from tests.distributed.pool import Pool
from tests.distributed.small import EAGER, small
from tests.distributed.test_loop import differ, gradients

DISPATCH = [("*", "[*, dispatch]")]
Sent = tuple[dict, dict]  # forward and backward


def trained(rank: int, family: str) -> tuple[float, float, Sent, Sent, list[str]]:
    """How far gradients are off, eager and compiled, what was sent, and where compiled code has gaps."""
    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    counters.clear()
    model, inputs, module = parallel_of(family, mesh_of((2, 2)), pins=DISPATCH, capacity=2.0)
    model(**inputs)["loss"].backward()
    sent, errors = [], []
    for one in (module, torch.compile(module, backend="aot_eager")):
        module.zero_grad()
        executor_of(module).count.clear()
        one(**inputs)["loss"].backward()
        sent.append((dict(executor_of(module).count.forward), dict(executor_of(module).count.backward)))
        errors.append(differ(gradients(module), gradients(model)))
    return errors[0], errors[1], sent[0], sent[1], list(counters["graph_break"])


@pytest.mark.full
def test_compiled_in_one_piece(pool: Pool) -> None:
    for eager, compiled, sent, sent_compiled, breaks in pool(trained, "mixtral"):
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
