"""Borders exchanged from process to process: gradients of one device, compiled as well."""

import warnings

import pytest
import torch

from tapas.runtime.module import executor_of
from tests.distributed.parallel import mesh_of, parallel_of
from tests.distributed.pool import Pool
from tests.distributed.test_loop import differ, gradients
from tests.distributed.test_ring import Sent

POSITIONS = [("*", "[height, width]")]


def trained(rank: int, family: str) -> tuple[float, float, Sent, Sent, list[str]]:
    """How far gradients are off, eager and compiled, and what was sent."""
    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    counters.clear()
    model, inputs, module = parallel_of(family, mesh_of((2, 2)), pins=POSITIONS)
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
def test_borders_of_processes(pool: Pool) -> None:
    for eager, compiled, sent, sent_compiled, breaks in pool(trained, "residuals"):
        assert eager < 1e-9 and compiled < 1e-9
        assert sent == sent_compiled and all(("halo", (axis,)) in phase for phase in sent for axis in (0, 1))
        assert breaks == []
