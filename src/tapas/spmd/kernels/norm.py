"""Norms whose statistics span devices: means in two passes, as stable as on one device."""

from collections.abc import Sequence
from math import prod

import torch

from tapas.rules.base import Local
from tapas.spmd.kernels.common import Comms, Reader, accumulated, axes_of, copied, nothing, total


def _statistics(
    comms: Comms, axes: tuple[int, ...], x: torch.Tensor, dims: tuple[int, ...], count: int, eps: float, centre=True
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x normalized over `dims` of all devices on `axes`, its mean (if wanted) and inverse deviation."""
    mean = None
    if centre:
        mean = total(comms, axes, x.sum(dims, keepdim=True)) / count
        x = x - copied(comms, axes, mean)
    scale = torch.rsqrt(total(comms, axes, x.square().sum(dims, keepdim=True)) / count + eps)
    return x * copied(comms, axes, scale), mean, scale


def _scaled(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _epsilon(eps: float | None, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if eps is None else eps


def _last_dims(local: Local, comms: Comms, operands: Sequence[torch.Tensor], centre: bool):
    """Layer norm and RMS norm; the normalized dims are the factors named h0, h1, ..."""
    read = Reader(local, operands)
    x, normalized = read("input"), read("normalized_shape")
    dtype = accumulated(x.dtype)
    dims = tuple(range(x.dim() - len(normalized), x.dim()))
    weight, bias = read("weight"), read("bias")
    eps = _epsilon(read("eps"), dtype)
    axes = axes_of(local, (f"h{i}" for i in range(len(normalized))))
    y, mean, scale = _statistics(comms, axes, x.to(dtype), dims, prod(normalized), eps, centre)
    y = _scaled(y, weight, bias)
    return _given(local, y, *([] if mean is None else [mean]), scale)


def _given(local: Local, *results: torch.Tensor):
    """What the operator returns, as it returns it."""
    found = tuple(r.to(getattr(torch, t.dtype)) for r, t in zip(results, local.call.results, strict=False))
    return found[0] if len(found) == 1 else found


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
    grouped = x.to(accumulated(x.dtype)).reshape(x.shape[0], x.shape[1] // channels, channels, *x.shape[2:])
    dims, count = tuple(range(2, grouped.dim())), channels * prod(shape[2:])
    y, _, _ = _statistics(comms, axes, grouped, dims, count, read("eps"))
    weight, bias = (_by_channel(p, x.dim()) for p in (read("weight"), read("bias")))
    return _scaled(y.reshape(x.shape), weight, bias).to(x.dtype)


def _by_channel(parameter: torch.Tensor | None, rank: int) -> torch.Tensor | None:
    return None if parameter is None else parameter.reshape(1, -1, *[1] * (rank - 2))


def batch_norm(local: Local, comms: Comms, *operands: torch.Tensor):
    """Training: statistics of the whole batch, wherever its samples and positions are."""
    read = Reader(local, operands)
    x, shape = read("input"), local.call.operands[0].shape
    dims, count = (0, *range(2, x.dim())), prod(shape) // shape[1]
    axes = axes_of(local, ("n", *(f"s{i}" for i in range(x.dim() - 2)))) if read("training") else ()
    if not axes:
        return read.run() if x.numel() else _no_batch(local, operands, read)
    y, mean, scale = _statistics(comms, axes, x.to(accumulated(x.dtype)), dims, count, read("eps"))
    assert mean is not None
    weight, bias = (_by_channel(p, x.dim()) for p in (read("weight"), read("bias")))
    y, mean, scale = _scaled(y, weight, bias), mean.flatten(), scale.flatten()
    unbiased = (scale.detach() ** -2 - read("eps")) * (count / max(count - 1, 1))
    moved = [
        (old, torch.lerp(old.to(new.dtype), new, read("momentum")).to(old.dtype))
        for old, new in ((read("running_mean"), mean.detach()), (read("running_var"), unbiased))
        if old is not None
    ]
    if len(local.call.results) < 5:  # not functional
        for old, new in moved:
            old.copy_(new)
    return _given(local, y, mean, scale, *(new for _, new in moved))


def _no_batch(local: Local, operands: Sequence[torch.Tensor], read: Reader):
    """Nothing to normalize: the operator itself would divide by zero. Running statistics stay as they are."""
    found = [nothing(local, operands, i) for i in range(len(local.call.results))]
    found[3:] = [read(name).clone() for name in ("running_mean", "running_var")[: len(found[3:])]]
    return found[0] if len(found) == 1 else tuple(found)
