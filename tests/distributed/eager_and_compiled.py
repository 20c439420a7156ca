"""A model trained for a pass on ranks of 2x2 as it is, and compiled."""

import warnings

import torch

from tapas.runtime.module import executor_of
from tests.distributed.parallel import mesh_of, parallel_of
from tests.distributed.test_loop import differ, gradients

Sent = tuple[dict, dict]  # forward and backward


def trained(
    rank: int, family: str, pins: list[tuple[str, str]], capacity: float | None = None
) -> tuple[float, float, Sent, Sent, list[str]]:
    """How far gradients are off, eager and compiled, what was sent, and where compiled code has gaps."""
    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    counters.clear()
    model, inputs, module = parallel_of(family, mesh_of((2, 2)), pins=pins, capacity=capacity)
    model(**inputs)["loss"].backward()
    sent, errors = [], []
    for one in (module, torch.compile(module, backend="aot_eager")):
        module.zero_grad()
        executor_of(module).count.clear()
        one(**inputs)["loss"].backward()
        sent.append((dict(executor_of(module).count.forward), dict(executor_of(module).count.backward)))
        errors.append(differ(gradients(module), gradients(model)))
    return errors[0], errors[1], sent[0], sent[1], list(counters["graph_break"])
