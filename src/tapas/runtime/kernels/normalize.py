"""Means, norms and softmax over dims that span devices: means in two passes, as stable as on one device."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from tapas.rules.base import Local
from tapas.runtime.kernels.common import Comms, Reader, accumulated, axes_of, copied, largest, nothing, shared, total


class _Squares(torch.autograd.Function):
    """The sum of squares of x less its mean. Kept for the backward pass is x alone, as torch's own norms do it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mean: torch.Tensor | None, dims: tuple[int, ...]) -> torch.Tensor:
        ctx.save_for_backward(x, mean)
        ctx.dims = dims
        return _centred(x, mean).square().sum(dims, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, mean = ctx.saved_tensors
        to_x = _centred(x, mean) * (2 * grads[0])
        return to_x.to(x.dtype), None if mean is None else -to_x.sum(ctx.dims, keepdim=True), None


class _Normalized(torch.autograd.Function):
    """(x - mean) * scale * weight + bias, which keeps x alone, too."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mean: torch.Tensor | None, scale: torch.Tensor, weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        y = _centred(x, mean) * scale
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,), (x, mean, scale, weight) = grads, ctx.saved_tensors
        product = grad * _centred(x, mean)
        to_scale = (product if weight is None else product * weight).sum_to_size(scale.shape)
        to_weight = None if weight is None else (product * scale).sum_to_size(weight.shape).to(weight.dtype)
        del product  # or there would be a tensor more than need be
        to_x = grad * scale if weight is None else (grad * weight).mul_(scale)
        to_mean = None if mean is None else -to_x.sum_to_size(mean.shape)
        to_bias = None if ctx.bias is None else grad.sum_to_size(ctx.bias[0]).to(ctx.bias[1])
        return to_x.to(x.dtype), to_mean, to_scale, to_weight, to_bias


def _centred(x: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    x = x.to(accumulated(x.dtype))
    return x if mean is None else x - mean


def _normalized(
    comms: Comms, axes: tuple[int, ...], x: torch.Tensor, dims: tuple[int, ...], count: int, eps: float,
    weight: torch.Tensor | None, bias: torch.Tensor | None, centre: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """x normalized over `dims` of all devices on `axes`, its mean (if wanted) and inverse deviation."""
    mean = near = None
    if centre:
        mean = total(comms, axes, x.sum(dims, keepdim=True, dtype=accumulated(x.dtype))) / count
        near = copied(comms, axes, mean)
    scale = torch.rsqrt(total(comms, axes, _Squares.apply(x, near, dims)) / count + eps)  # type: ignore[operator]
    return _Normalized.apply(x, near, copied(comms, axes, scale), weight, bias), mean, scale  # type: ignore[return-value]


def _epsilon(eps: float | None, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if eps is None else eps


def _last_dims(local: Local, comms: Comms, operands: Sequence[torch.Tensor], centre: bool):
    """Layer norm and RMS norm; the normalized dims are the factors named h0, h1, ..."""
    read = Reader(local, operands)
    x, normalized = read("input"), read("normalized_shape")
    dims = tuple(range(x.dim() - len(normalized), x.dim()))
    weight, bias = read("weight"), read("bias")
    eps = _epsilon(read("eps"), accumulated(x.dtype))
    axes = axes_of(local, (f"h{i}" for i in range(len(normalized))))
    y, mean, scale = _normalized(comms, axes, x, dims, prod(normalized), eps, weight, bias, centre)
    return _given(local, y, *([] if mean is None else [mean]), scale)


def _given(local: Local, *results: torch.Tensor):
    """What the operator returns, as it returns it."""
    returned = tuple(r.to(getattr(torch, t.dtype)) for r, t in zip(results, local.call.results, strict=False))
    return returned[0] if len(returned) == 1 else returned


def layer_norm(local: Local, comms: Comms, *operands: torch.Tensor):
    return _last_dims(local, comms, operands, centre=True)


def rms_norm(local: Local, comms: Comms, *operands: torch.Tensor):
    return _last_dims(local, comms, operands, centre=False)


def group_norm(local: Local, comms: Comms, *operands: torch.Tensor):
    """Groups of channels stay together; positions (s0, s1, ...) may be split."""
    read = Reader(local, operands)
    x, shape = read("input"), local.call.operands[0].shape
    channels = shape[1] // read("num_groups")
    axes = axes_of(local, (f"s{i}" for i in range(x.dim() - 2)))
    if not axes:  # whole groups only
        return read.run(num_groups=x.shape[1] // channels) if x.numel() else nothing(local, operands)
    grouped = x.reshape(x.shape[0], x.shape[1] // channels, channels, *x.shape[2:])
    dims, count = tuple(range(2, grouped.dim())), channels * prod(shape[2:])
    weight, bias = (_by_channel(p, (-1, channels), x.dim()) for p in (read("weight"), read("bias")))
    y, _, _ = _normalized(comms, axes, grouped, dims, count, read("eps"), weight, bias)
    return y.reshape(x.shape).to(x.dtype)


def _by_channel(parameter: torch.Tensor | None, channels: tuple[int, ...], rank: int) -> torch.Tensor | None:
    return None if parameter is None else parameter.reshape(1, *channels, *[1] * (rank - 2))


def batch_norm(local: Local, comms: Comms, *operands: torch.Tensor):
    """Training: statistics of the whole batch, wherever its samples and positions are."""
    read = Reader(local, operands)
    x, shape = read("input"), local.call.operands[0].shape
    dims, count = (0, *range(2, x.dim())), prod(shape) // shape[1]
    axes = axes_of(local, ("n", *(f"s{i}" for i in range(x.dim() - 2)))) if read("training") else ()
    if not axes:
        return read.run() if x.numel() else _no_batch(local, operands, read)
    weight, bias = (_by_channel(p, (-1,), x.dim()) for p in (read("weight"), read("bias")))
    y, mean, scale = _normalized(comms, axes, x, dims, count, read("eps"), weight, bias)
    assert mean is not None
    mean, scale = mean.flatten(), scale.flatten()
    unbiased = (scale.detach() ** -2 - read("eps")) * (count / max(count - 1, 1))
    moved = [
        (old, torch.lerp(old.to(new.dtype), new, read("momentum")).to(old.dtype))
        for old, new in ((read("running_mean"), mean.detach()), (read("running_var"), unbiased))
        if old is not None
    ]
    if local.call.target.startswith("tapas."):
        return _given(local, y, *(new for _, new in moved))
    if len(local.call.results) < 5:  # not functional
        for old, new in moved:
            old.copy_(new)
    return _given(local, y, mean, scale, *(new for _, new in moved))


def _no_batch(local: Local, operands: Sequence[torch.Tensor], read: Reader):
    """Nothing to normalize: the operator itself would divide by zero. Running statistics stay as they are."""
    results = [nothing(local, operands, i) for i in range(len(local.call.results))]
    first = 1 if local.call.target.startswith("tapas.") else 3
    results[first:] = [read(name).clone() for name in ("running_mean", "running_var")[: len(results[first:])]]
    return results[0] if len(results) == 1 else tuple(results)


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


def mean(local: Local, comms: Comms, x: torch.Tensor) -> torch.Tensor:
    """This rank's share of a mean: its sum over the number of elements of the whole dims. Nothing is sent."""
    read, shape = Reader(local, (x,)), local.call.operands[0].shape
    dims = read("dim") or range(len(shape))
    dims = [dims] if isinstance(dims, int) else list(dims)
    share = x.sum(dims, keepdim=bool(read("keepdim")), dtype=read("dtype"))
    return share / prod([shape[d] for d in dims])
