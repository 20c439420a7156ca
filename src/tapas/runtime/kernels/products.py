"""Products of which a rank has a part: queries of a causal sequence or query heads, channels, rows of experts."""

from collections.abc import Sequence
from typing import Any

import torch

from tapas.rules.base import Local
from tapas.rules.windows import NAMES
from tapas.runtime.kernels import halo, key_parts, ring
from tapas.runtime.kernels.common import Comms, Reader, empty_results, nothing, positions


def attention(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    if local.axes_of("ring"):
        return ring.attention(local, comms, *operands)
    if local.axes_of("s"):
        return key_parts.attention(local, comms, *operands)
    read = Reader(local, operands)
    q, k, v = read("query"), read("key"), read("value")
    changed: dict[str, Any] = {}
    number = local.call.arg(0, "query").index
    if local.axes_of("hq"):  # whole KV heads are here: take the one of each query head
        group = local.call.operands[number].shape[-3] // k.shape[-3]
        pieces, masked = local.operand_pieces(number, q.dim() - 3), bool(local.axes_of("l"))
        shareable = read("attn_mask") is None and not masked  # no fused kernel takes both
        k, v, changed["enable_gqa"] = _of_queries(k, v, pieces, group, shareable)
    if local.axes_of("l") and read("is_causal"):
        pieces = local.operand_pieces(number, q.dim() - 2)
        seen = max(1, min(k.shape[-2], max(stop for _, stop in pieces)))  # later keys are never looked at
        k, v = k[..., :seen, :], v[..., :seen, :]
        rows = positions(pieces, q.device)
        changed |= {"is_causal": False, "attn_mask": rows[:, None] >= torch.arange(seen, device=q.device)}
    return read.run(query=q, key=k, value=v, **changed)


def _of_queries(
    k: torch.Tensor, v: torch.Tensor, pieces: Sequence[tuple[int, int]], group: int, shareable: bool
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The KV heads of some query heads, and whether several of these share one: then nothing is copied. That takes
    equally many for each."""
    heads = [head // group for start, stop in pieces for head in range(start, stop)]
    count = len(set(heads))
    each = len(heads) // max(count, 1)
    if heads == [heads[0] + i // each for i in range(len(heads))] and (shareable or each <= 1):
        first = heads[0] if heads else 0
        return k.narrow(-3, first, count), v.narrow(-3, first, count), each > 1
    chosen = positions(pieces, k.device) // group
    return k.index_select(-3, chosen), v.index_select(-3, chosen), False


def channelwise(local: Local, comms: Comms, *operands: torch.Tensor):
    """Operators that refuse tensors without channels."""
    if any(0 in local.result_shape(i) for i in range(len(local.call.results))):
        return empty_results(local, operands)
    return Reader(local, operands).run()


def convolution(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    read = Reader(local, operands)
    x, weight, bias = read("input"), read("weight"), read("bias")
    if 0 in local.result_shape() or weight.numel() == 0:
        empty = nothing(local, operands)
        return empty if bias is None else empty + bias.reshape(-1, *[1] * (weight.dim() - 2))
    groups, dims = _groups(local, read, x, weight), weight.dim() - 2
    if any(local.axes_of(name) for name in NAMES[dims]):
        return halo.convolve(local, comms, read, dims, groups)
    return read.run(groups=groups)


def _groups(local: Local, read: Reader, x: torch.Tensor, weight: torch.Tensor) -> int:
    """How many groups are here: all their channels, as only whole groups are dealt out first."""
    if local.axes_of("i") or local.axes_of("o"):  # within one group
        return 1
    channel = x.dim() - weight.dim() + 1
    return x.shape[channel] * read("groups") // local.call.operands[0].shape[channel]


def grouped_mm(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    """Rows come sorted by expert; `offs` says where each expert's rows end, of all rows and experts."""
    x, weight, ends = operands
    if x.numel() == 0 or weight.numel() == 0:
        return nothing(local, operands)
    if local.axes_of("t"):
        pieces = local.operand_pieces(0, 0)
        ends = torch.stack([ends.clamp(start, stop) - start for start, stop in pieces]).sum(0, dtype=ends.dtype)
    if not local.axes_of("e"):
        return Reader(local, (x, weight, ends)).run()
    rows, offset = nothing(local, operands), 0
    for first, last in local.operand_pieces(1, 0):
        if first < last:
            rows = rows + _share(local, x, weight[offset : offset + last - first], ends, first, last)
        offset += last - first
    return rows


def _share(
    local: Local, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, first: int, last: int
) -> torch.Tensor:
    """The rows of experts first:last; zero elsewhere.

    Own rows go to the front without asking the device how many they are; what lies behind them is
    left alone by the product, so it may be anything and is masked on the way in and out.
    """
    begin = ends[first - 1] if first else torch.zeros_like(ends[0])
    rows = torch.arange(x.shape[0], device=x.device)
    mine = (rows < ends[last - 1] - begin).unsqueeze(-1)
    front = x.index_select(0, (rows + begin) % x.shape[0]).masked_fill(~mine, 0)
    made = Reader(local, (front, weight, ends[first:last] - begin)).run().masked_fill(~mine, 0)
    return made.index_select(0, (rows - begin) % x.shape[0])
