"""Attention over a window of which a rank has some queries: their keys are here, or their neighbours send some."""

import torch

from tapas.ir.custom_ops import attention_within
from tapas.rules.base import Halo, Local
from tapas.rules.window_attention import NEAR
from tapas.runtime.kernels.common import Comms, Reader, nothing, positions
from tapas.runtime.kernels.halo import with_borders


def attention(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    if 0 in local.result_shape():
        return nothing(local, operands)
    read, (q, k, v) = Reader(local, operands), operands
    halo, dim = Halo(read("before"), read("after")), q.dim() - 2
    pieces, length = local.operand_pieces(0, dim), local.call.operands[1].shape[dim]
    first, last = min(start for start, _ in pieces) - halo.before, max(stop for _, stop in pieces) + halo.after
    if axes := local.axes_of(NEAR):
        k, v = (with_borders(comms[axes[0]], x, dim, halo, 0.0, kept=True) for x in (k, v))
    else:
        first, last = max(0, first), min(length, last)
        k, v = (x.narrow(dim, first, last - first) for x in (k, v))
    places = torch.arange(first, last, device=q.device)
    there = (places >= 0) & (places < length)  # what lies beyond the ends is nothing
    return attention_within(q, k, v, positions(pieces, q.device), places, halo.before, halo.after, read("scale"), there)
