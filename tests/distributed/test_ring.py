"""Keys and values passed from process to process: gradients of one device, compiled and in half precision as well."""

import pytest
import torch

import tapas
from tests.distributed.eager_and_compiled import trained
from tests.distributed.parallel import mesh_of
from tests.distributed.pool import Pool
from tests.distributed.small import EAGER, small
from tests.distributed.test_loop import differ, gradients

RING = [("*", "[batch, ring]")]
NEAR = [("*", "[batch, near]")]


def test_a_ring_of_processes(pool: Pool) -> None:
    for eager, compiled, sent, sent_compiled, breaks in pool(trained, "llama", RING):
        assert eager < 1e-9 and compiled < 1e-9
        assert sent == sent_compiled and all(("ring", (1,)) in phase for phase in sent)
        assert breaks == []


@pytest.mark.full
def test_neighbours_of_processes(pool: Pool) -> None:
    """Who sends what a window reaches."""
    for eager, compiled, sent, sent_compiled, breaks in pool(trained, "mistral", NEAR):
        assert eager < 1e-9 and compiled < 1e-9
        assert sent == sent_compiled and all(("halo", (1,)) in phase for phase in sent)
        assert breaks == []


def in_half_precision(rank: int, family: str) -> tuple[float, float]:
    """How far gradients are off under autocast, with a ring and without."""
    torch.manual_seed(0)
    model, inputs = small(family)
    module = tapas.parallelize(model, inputs, mesh=mesh_of((2, 2)), cluster=EAGER, pins=RING)
    model(**inputs)["loss"].backward()
    wanted, found = gradients(model), []
    for one in (module, model):
        one.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            one(**inputs)["loss"].backward()
        found.append(differ(gradients(one), wanted))
    return found[0], found[1]


def test_half_precision(pool: Pool) -> None:
    for ours, original in pool(in_half_precision, "llama"):
        assert 1e-6 < ours < 2 * original
