"""Convolutions and pooling where a rank has some of the channels, maybe none."""

import torch

from tapas.rules.base import Local
from tapas.runtime.kernels.common import Comms, Reader, nothing


def channelwise(local: Local, comms: Comms, *operands: torch.Tensor):
    """Operators that refuse tensors without channels."""
    if any(0 in local.result_shape(i) for i in range(len(local.call.results))):
        found = tuple(nothing(local, operands, i) for i in range(len(local.call.results)))
        return found[0] if len(found) == 1 else found
    return Reader(local, operands).run()


def convolution(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    read = Reader(local, operands)
    x, weight, bias = read("input"), read("weight"), read("bias")
    if 0 in local.result_shape() or weight.numel() == 0:
        empty = nothing(local, operands)
        return empty if bias is None else empty + bias.reshape(-1, *[1] * (weight.dim() - 2))
    return read.run(groups=_groups(local, read, x, weight))


def _groups(local: Local, read: Reader, x: torch.Tensor, weight: torch.Tensor) -> int:
    """How many groups are here: all their channels, as only whole groups are dealt out first."""
    if local.axes_of("i") or local.axes_of("o"):  # within one group
        return 1
    channel = x.dim() - weight.dim() + 1
    return x.shape[channel] * read("groups") // local.call.operands[0].shape[channel]
