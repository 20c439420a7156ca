"""Softmax and log-softmax over a dim that is spread over devices."""

import torch

from tapas.rules.base import Local
from tapas.runtime.kernels.common import Comms, Reader, accumulated, axes_of, largest, shared


def _exponents(local: Local, comms: Comms, operands: tuple[torch.Tensor, ...]):
    """x minus its largest element, the sum of exponentials, and the result's dtype."""
    x = operands[0]
    dtype = getattr(torch, local.call.results[0].dtype)
    dim = Reader(local, operands)("dim")
    axes = axes_of(local, ("c",))
    x = x.to(accumulated(dtype))
    x = x - largest(comms, axes, peak(x.detach(), dim))
    return x, shared(comms, axes, x.exp().sum(dim, keepdim=True)), dtype


def peak(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The largest element, also of nothing."""
    if x.shape[dim] == 0:
        return x.sum(dim, keepdim=True) - torch.inf
    return x.amax(dim, keepdim=True)


def softmax(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    x, total, dtype = _exponents(local, comms, operands)
    return (x.exp() / total).to(dtype)


def log_softmax(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    x, total, dtype = _exponents(local, comms, operands)
    return (x - total.log()).to(dtype)
