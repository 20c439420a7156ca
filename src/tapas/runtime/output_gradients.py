"""Outputs of a program, and what becomes of the gradients that users' losses have for them."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tapas._torch import whole_tensor
from tapas.errors import TapasError


class _PlannedForInference(torch.autograd.Function):
    """Hands a tensor on, and refuses its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        fact = "the model returns no loss, or was planned for inference: the plan has no gradients"
        raise TapasError("backward", fact, "pass training=True; the loss may then be made outside of the model")


class _PlainGradient(torch.autograd.Function):
    """Hands a tensor on; its gradient is the same on all ranks, whatever users computed with."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return whole_tensor(gradient) if isinstance(gradient, DTensor) else gradient


def plain_output(value: torch.Tensor) -> torch.Tensor:
    """An output that is the same on all ranks, to be used together with plain tensors and with DTensors."""
    return _PlainGradient.apply(value) if value.requires_grad else value  # type: ignore[return-value]


def refusing_gradients(value: torch.Tensor) -> torch.Tensor:
    """An output that requires a gradient as the original's does, which the program cannot give."""
    if not (value.is_floating_point() or value.is_complex()):
        return value
    return _PlannedForInference.apply(value, torch.zeros((), requires_grad=True))  # type: ignore[return-value]
