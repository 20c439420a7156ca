"""Attention whose queries, keys and values are all split on the sequence: keys and values go round an axis' ranks.

A rank computes on the keys and values it has while the next ones are under way, and combines what comes of them with
the logarithms of their sums of exponentials. Going back, keys and values go round once more, and their gradients behind
them: those of a piece start at the rank after its own and are home after one round.

It is an operator to torch: compiled programs have it in one piece, and selective recomputation keeps its results.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tapas.rules.base import Local
from tapas.runtime.kernels.common import Comm, Comms, Reader, accumulated
from tapas.runtime.kernels.partial_attention import Three, attend, attend_back
from tapas.runtime.numbered import numbered


def attention(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    read, (axis,) = Reader(local, operands), local.axes_of("ring")
    q, k, v = (_autocast(read(name)) for name in ("query", "key", "value"))
    scale = read("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    lengths, counts = _lengths(local, axis), _counts(local, q.dim() - 3)
    flat = map(_four_dims, (q, k, v))
    made, _ = ring_attention(*flat, comms[axis].number, bool(read("is_causal")), scale, counts, lengths)
    return made.reshape(*q.shape[:-1], v.shape[-1])


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """It knows attention, but not this operator."""
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if casts else x


def _four_dims(x: torch.Tensor) -> torch.Tensor:
    heads = x.shape[-3] if x.dim() > 2 else 1
    return x.reshape(prod(x.shape[:-3]), heads, *x.shape[-2:])


def _lengths(local: Local, axis: int) -> list[int]:
    """How much of the sequence each rank of the ring has; these follow one another."""
    query, before, after = local.call.arg(0, "query").index, local.coord[:axis], local.coord[axis + 1 :]
    dim = len(local.call.operands[query].shape) - 2
    ranks = (replace(local, coord=(*before, index, *after)) for index in range(local.mesh[axis]))
    return [sum(stop - start for start, stop in rank.operand_pieces(query, dim)) for rank in ranks]


def _counts(local: Local, dim: int) -> list[int]:
    """How many of the query heads here share each of the KV heads here; nothing where each has one."""
    query, key = (local.call.arg(i, name).index for i, name in enumerate(("query", "key")))
    if dim < 0 or local.call.operands[query].shape[dim] == local.call.operands[key].shape[dim]:
        return []
    group = local.call.operands[query].shape[dim] // local.call.operands[key].shape[dim]
    mine = [head // group for start, stop in local.operand_pieces(query, dim) for head in range(start, stop)]
    return [mine.count(head) for start, stop in local.operand_pieces(key, dim) for head in range(start, stop)]


@torch.library.custom_op("tapas::ring_attention", mutates_args=())
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, comm: int, causal: bool, scale: float, counts: list[int],
    lengths: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The result and the logarithm of its sum of exponentials."""
    with torch.autocast(q.device.type, enabled=False):
        return _Ring(numbered(comm), causal, scale, counts, lengths).forward(q, k, v)


@ring_attention.register_fake
def _(q, k, v, comm, causal, scale, counts, lengths):  # type: ignore[no-untyped-def]
    return _like_result(q, v), q.new_empty(q.shape[:-1], dtype=accumulated(q.dtype))


@torch.library.custom_op("tapas::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    comm: int, causal: bool, scale: float, counts: list[int], lengths: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    with torch.autocast(q.device.type, enabled=False):
        return _Ring(numbered(comm), causal, scale, counts, lengths).backward(gradient, q, k, v, out, lse)


@ring_attention_backward.register_fake
def _(gradient, q, k, v, out, lse, comm, causal, scale, counts, lengths):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.rest = inputs[3:]
    ctx.set_materialize_grads(False)


def _back(ctx: Any, gradient: torch.Tensor | None, _: torch.Tensor | None) -> tuple:
    if gradient is None:
        return (None,) * 8
    return *ring_attention_backward(gradient, *ctx.saved_tensors, *ctx.rest), *(None,) * 5


ring_attention.register_autograd(_back, setup_context=_keep)


def _like_result(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """With heads next to features, where readers put them together, as torch's own kernels lay it out."""
    samples, heads, length, _ = q.shape
    return q.new_empty(samples, length, heads, v.shape[-1]).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Ring:
    comm: Comm
    causal: bool
    scale: float
    counts: Sequence[int]
    lengths: Sequence[int]  # of the sequence, by rank

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide, made = accumulated(q.dtype), _like_result(q, v).zero_()
        total, lse = None, q.new_zeros(q.shape[:-1], dtype=wide)
        for origin, keys, values in self._round((k, v), "forward"):
            if not self._looks_at(origin, q, keys):
                continue
            out, here = attend(q, keys, values, self._diagonal(origin), self.scale, self.counts)
            if total is None:
                total, lse = out.to(wide, copy=True), here.contiguous()
                continue
            lse = torch.logaddexp(lse, here)
            total.lerp_(out.to(wide), (here - lse).exp_().unsqueeze(-1))
        return made if total is None else made.copy_(total), lse

    def backward(
        self, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Three:  # fmt: skip
        wide = accumulated(q.dtype)
        of_queries = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)
        own, going = self._sums(k, v), self._sums(k, v)
        arriving, work = [torch.empty_like(x) for x in going], None
        for origin, keys, values in self._round((k, v), "backward"):
            home = origin == self.comm.index
            if work is not None:
                work.wait()
                going, arriving = arriving, going
            if self._looks_at(origin, q, keys):
                diagonal = self._diagonal(origin)
                part = attend_back(gradient, q, keys, values, out, lse, diagonal, self.scale, self.counts)
                of_queries += part[0]
                for whole, piece in zip(own if home else going, part[1:], strict=True):
                    whole.narrow(-2, 0, piece.shape[-2]).add_(piece)
            work = None if home else self.comm.pass_on(going, arriving, "backward")
        if work is not None:
            work.wait()
            own = [x.add_(y) for x, y in zip(own, arriving, strict=True)]
        back = (g.narrow(-2, 0, x.shape[-2]).to(x.dtype, copy=True) for g, x in zip(own, (k, v), strict=True))
        of_keys, of_values = (x.contiguous() for x in back)
        return of_queries.to(q.dtype), of_keys, of_values

    def _sums(self, *held: torch.Tensor) -> list[torch.Tensor]:
        """Of gradients: on their way all are as long as the longest."""
        shapes = [(*x.shape[:-2], max(self.lengths), x.shape[-1]) for x in held]
        return [x.new_zeros(shape, dtype=accumulated(x.dtype)) for x, shape in zip(held, shapes, strict=True)]

    def _round(self, held: Sequence[torch.Tensor], phase: str) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Keys and values of all ranks, own ones first, with the rank they are of. The next ones are sent for before
        these are computed on."""
        sent = [_padded(x, max(self.lengths)) for x in held]
        for step in range(self.comm.size):
            arriving, work = sent, None
            if step < self.comm.size - 1:
                arriving = [torch.empty_like(x) for x in sent]
                work = self.comm.pass_on(sent, arriving, phase)
            origin = (self.comm.index - step) % self.comm.size
            keys, values = (x.narrow(-2, 0, self.lengths[origin]) for x in sent)
            yield origin, keys, values
            if work is not None:
                work.wait()
            sent = arriving

    def _looks_at(self, origin: int, q: torch.Tensor, keys: torch.Tensor) -> bool:
        """Whether any query here looks at any key of a rank. Later ones are not looked at in a causal sequence."""
        return q.numel() > 0 and keys.numel() > 0 and not (self.causal and origin > self.comm.index)

    def _diagonal(self, origin: int) -> bool:
        return self.causal and origin == self.comm.index


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """In one piece of memory, with so many elements of the sequence."""
    if x.shape[-2] == length:
        return x.contiguous()
    whole = x.new_zeros((*x.shape[:-2], length, x.shape[-1]))
    whole.narrow(-2, 0, x.shape[-2]).copy_(x)
    return whole
