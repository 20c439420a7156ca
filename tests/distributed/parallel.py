"""Small models as parallel modules on workers, which capture each of them once for all tests."""

from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tapas
from tapas.capture.program import Captured, capture_program
from tests.distributed.small import EAGER, small

Inputs = dict[str, torch.Tensor]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).reshape(shape))


def model_of(family: str) -> tuple[nn.Module, Inputs]:
    """In float64 and without dropout, so that results can be compared."""
    model, inputs = small(family)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):  # of functional dropout
            module.dropout = 0.0
    if family == "mixtral":  # torch has no grouped product in float64
        model.set_experts_implementation("batched_mm")
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


@cache
def _captured(family: str, capacity: float | None = None) -> Captured:
    return capture_program(*model_of(family), capacity=capacity)


def parallel_of(family: str, mesh: DeviceMesh, **asked: Any) -> tuple[nn.Module, Inputs, nn.Module]:
    """A model, its inputs and its parallel module."""
    model, inputs = model_of(family)
    with patch("tapas.api.capture_program", lambda *_, capacity=None, **__: _captured(family, capacity)):
        return model, inputs, tapas.parallelize(model, inputs, mesh=mesh, **({"cluster": EAGER} | asked))
