"""Attention of some queries to some of their keys, and what it adds to the gradients, by fused kernels where there are.

All tensors are [samples, heads, sequence, features]. `counts` says for each KV head how many query heads share it, and
is empty where each has one of its own.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from tapas._torch import fused_attention, fused_attention_backward
from tapas.runtime.kernels.common import accumulated

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
FEATURES = 8  # fused kernels of GPUs want a multiple of so many


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, counts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and, for each query, the logarithm of its sum of exponentials. Causal: of a query and a key at the
    same place in what is given, and of keys before it."""
    k, v = _spread(k, counts), _spread(v, counts)
    ask, keys, values = _alike(q, k, v)
    fused = fused_attention(ask, keys, values, causal, scale)
    if fused is not None:
        return fused[0].narrow(-1, 0, v.shape[-1]), fused[1]
    scores = _scores(q, k, causal, scale)
    return scores.softmax(-1) @ v.to(scores.dtype), scores.logsumexp(-1)


def attend_back(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    causal: bool, scale: float, counts: Sequence[int],
) -> Three:  # fmt: skip
    """What these keys add to the gradients; the result and the logarithms are those of all keys of the queries. Those
    of keys and values are in the precision that sums are kept in."""
    of_q, of_k, of_v = _shares(gradient, q, _spread(k, counts), _spread(v, counts), out, lse, causal, scale)
    return of_q, _gathered(of_k, counts), _gathered(of_v, counts)


def _shares(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    causal: bool, scale: float,
) -> Three:  # fmt: skip
    given, ask, keys, values, result = _alike(gradient, q, k, v, out)
    fused = fused_attention_backward(given, ask, keys, values, result, lse, causal, scale)
    if fused is not None:
        return tuple(g.narrow(-1, 0, x.shape[-1]) for g, x in zip(fused, (q, k, v), strict=True))  # type: ignore[return-value]
    shares = (_scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()
    wide = shares.dtype
    gradient, out = gradient.to(wide), out.to(wide)
    slopes = shares * (gradient @ v.to(wide).mT - (gradient * out).sum(-1, keepdim=True)) * scale
    return slopes @ k.to(wide), slopes.mT @ q.to(wide), shares.mT @ gradient


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    wide = accumulated(q.dtype)
    scores = q.to(wide) @ k.to(wide).mT * scale
    if not causal:
        return scores
    return scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -torch.inf)


def _alike(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """With equally many features, more of them zero: which changes nothing."""
    size = max(x.shape[-1] for x in tensors)
    size += -size % FEATURES if tensors[0].device.type == "cuda" else 0
    return [x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in tensors]


def _spread(x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The KV head of each query head."""
    if len(set(counts)) == 1:
        return x.repeat_interleave(counts[0], 1)
    parts = [x.narrow(1, i, 1).expand(-1, count, -1, -1) for i, count in enumerate(counts) if count]
    return torch.cat(parts, 1) if parts else x


def _gathered(gradient: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The other way: gradients of KV heads."""
    wide = accumulated(gradient.dtype)
    if not counts:
        return gradient.to(wide)
    if len(set(counts)) == 1:
        return gradient.unflatten(1, (len(counts), counts[0])).sum(2, dtype=wide)
    return torch.stack([part.sum(1, dtype=wide) for part in gradient.split(list(counts), 1)], 1)
