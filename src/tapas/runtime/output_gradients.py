"""Outputs of a program, and what becomes of the gradients that users' losses have for them."""

from collections.abc import Callable
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


class _Returned(torch.autograd.Function):
    """Hands a tensor on; says when a backward pass comes to it. A gradient that is a DTensor, because users computed
    with one, is made plain."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, begin: Callable[[], None]) -> torch.Tensor:
        ctx.begin = begin
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.begin()
        (gradient,) = gradients
        return (whole_tensor(gradient) if isinstance(gradient, DTensor) else gradient), None


def returned(value: torch.Tensor, begin: Callable[[], None]) -> torch.Tensor:
    """What a program returns, as autograd sees it from outside; `begin`: when a backward pass enters the program."""
    return _Returned.apply(value, begin) if value.requires_grad else value  # type: ignore[return-value]


def refusing_gradients(value: torch.Tensor) -> torch.Tensor:
    """An output that requires a gradient as the original's does, which the program cannot give."""
    if not (value.is_floating_point() or value.is_complex()):
        return value
    return _PlannedForInference.apply(value, torch.zeros((), requires_grad=True))  # type: ignore[return-value]
