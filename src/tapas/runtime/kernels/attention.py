"""Attention with the queries of a causal sequence, or the query heads of shared KV heads, spread over devices."""

from typing import Any

import torch

from tapas.rules.base import Local
from tapas.runtime.kernels.common import Comms, Reader, positions


def attention(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    read = Reader(local, operands)
    q, k, v = read("query"), read("key"), read("value")
    changed: dict[str, Any] = {}
    number = local.call.arg(0, "query").index
    if local.axes_of("hq"):  # whole KV heads are here: take the one of each query head
        group = local.call.operands[number].shape[-3] // k.shape[-3]
        heads = positions(local.operand_pieces(number, q.dim() - 3), q.device) // group
        k, v = k.index_select(-3, heads), v.index_select(-3, heads)
        changed["enable_gqa"] = False
    if local.axes_of("l") and read("is_causal"):
        pieces = local.operand_pieces(number, q.dim() - 2)
        seen = max(1, min(k.shape[-2], max(stop for _, stop in pieces)))  # later keys are never looked at
        k, v = k[..., :seen, :], v[..., :seen, :]
        rows = positions(pieces, q.device)
        changed |= {"is_causal": False, "attn_mask": rows[:, None] >= torch.arange(seen, device=q.device)}
    return read.run(query=q, key=k, value=v, **changed)
