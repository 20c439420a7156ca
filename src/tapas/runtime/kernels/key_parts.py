"""Attention of queries to keys of which each rank has a part, as of a cache whose places are dealt out: no gradients.

A rank looks at the keys that it has. Results are weighted by the sums of their exponentials, which all ranks add up.
"""

from collections.abc import Sequence

import torch

from tapas.rules.base import Local
from tapas.runtime.kernels.common import Comms, Reader, accumulated, largest, total
from tapas.runtime.kernels.ring import counts_of


def attention(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    read, axes = Reader(local, operands), local.axes_of("s")
    q, k, v = (read(name) for name in ("query", "key", "value"))
    scale = q.shape[-1] ** -0.5 if (given := read("scale")) is None else given
    groups, k, v = _shared(k, v, counts_of(local, q.dim() - 3))
    scores = _scores(q, k, scale, groups, read("attn_mask"))
    peak = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*q.shape[:-1], 1), -torch.inf)
    peak = largest(comms, axes, peak)
    weights = (scores - peak.masked_fill(peak == -torch.inf, 0)).exp()  # of a query that looks at nothing: zero
    made = _grouped(weights, groups) @ v.to(weights.dtype)
    made = torch.cat([made.reshape(*q.shape[:-1], v.shape[-1]), weights.sum(-1, keepdim=True)], -1)
    made, summed = total(comms, axes, made).split([v.shape[-1], 1], -1)
    return (made / summed.masked_fill(summed == 0, 1)).to(v.dtype)


def _shared(k: torch.Tensor, v: torch.Tensor, counts: Sequence[int]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """How many query heads there are to each KV head, which are copied where that is not the same for all."""
    if len(set(counts)) <= 1:
        return (counts[0] if counts else 1), k, v
    heads = torch.tensor([head for head, count in enumerate(counts) for _ in range(count)], device=k.device)
    return 1, k.index_select(-3, heads), v.index_select(-3, heads)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, groups: int, mask: torch.Tensor | None) -> torch.Tensor:
    wide = accumulated(q.dtype)
    scores = (_grouped(q.to(wide), groups) @ k.to(wide).mT * scale).reshape(*q.shape[:-1], k.shape[-2])
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Query heads that share a KV head follow one another: together they are rows of one product."""
    if groups == 1:
        return x
    heads, rows = x.shape[-3] // groups, x.shape[-2] * groups
    return x.reshape(*x.shape[:-3], heads, rows, x.shape[-1])
