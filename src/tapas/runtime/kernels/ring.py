"""Attention whose queries, keys and values are all split on the sequence: keys and values go round an axis' ranks.

A rank computes on the keys and values it has while the next ones are under way, and combines what comes of them with
the logarithms of their sums of exponentials. Going back, keys and values go round once more, and their gradients behind
them: those of a piece start at the rank after its own and are home after one round.

In a causal sequence later queries look at more. So ranks exchange halves of what they have first: each gets an early
and a late piece (the first and the last of all, the second and the last but one, ...), with which all have the same to
do at every step of the round.

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
    comm, lengths, counts = comms[axis], _lengths(local, axis), counts_of(local, q.dim() - 3)
    flat = [_four_dims(x) for x in (q, k, v)]
    firsts: list[int] = []
    zigzag = Zigzag(lengths) if read("is_causal") else None
    if zigzag is not None:
        lengths, firsts = zigzag.lengths, zigzag.firsts
        flat = [zigzag.deal(comm, x) for x in flat]
    made, _ = ring_attention(*flat, comm.number, scale, counts, lengths, firsts)
    made = made if zigzag is None else zigzag.collect(comm, made)
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


def counts_of(local: Local, dim: int) -> list[int]:
    """How many of the query heads here share each of the KV heads here; nothing where each has one."""
    query, key = (local.call.arg(i, name).index for i, name in enumerate(("query", "key")))
    if dim < 0 or local.call.operands[query].shape[dim] == local.call.operands[key].shape[dim]:
        return []
    group = local.call.operands[query].shape[dim] // local.call.operands[key].shape[dim]
    mine = [head // group for start, stop in local.operand_pieces(query, dim) for head in range(start, stop)]
    return [mine.count(head) for start, stop in local.operand_pieces(key, dim) for head in range(start, stop)]


@torch.library.custom_op("tapas::ring_attention", mutates_args=())
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, comm: int, scale: float, counts: list[int], lengths: list[int],
    firsts: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The result and the logarithm of its sum of exponentials."""
    with torch.autocast(q.device.type, enabled=False):
        return _Ring(numbered(comm), scale, counts, lengths, firsts).forward(q, k, v)


@ring_attention.register_fake
def _(q, k, v, comm, scale, counts, lengths, firsts):  # type: ignore[no-untyped-def]
    return _like_result(q, v), q.new_empty(q.shape[:-1], dtype=accumulated(q.dtype))


@torch.library.custom_op("tapas::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    comm: int, scale: float, counts: list[int], lengths: list[int], firsts: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    with torch.autocast(q.device.type, enabled=False):
        return _Ring(numbered(comm), scale, counts, lengths, firsts).backward(gradient, q, k, v, out, lse)


@ring_attention_backward.register_fake
def _(gradient, q, k, v, out, lse, comm, scale, counts, lengths, firsts):  # type: ignore[no-untyped-def]
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


@dataclass(frozen=True)
class Zigzag:
    """Each rank's part of a sequence in two pieces, of which other ranks get one: of 2n in all, rank r works on piece r
    and on piece 2n - 1 - r.

    >>> Zigzag([4, 4, 3]).pieces, Zigzag([4, 4, 3]).lengths
    ([2, 2, 2, 2, 2, 1], [3, 4, 4])
    """

    held: Sequence[int]  # how much of the sequence each rank has; these follow one another

    @property
    def pieces(self) -> list[int]:
        """Their lengths."""
        return [half for length in self.held for half in (length - length // 2, length // 2)]

    @property
    def lengths(self) -> list[int]:
        """Of what each rank works on."""
        return [first + last for first, last in zip(self.firsts, reversed(self.pieces), strict=False)]

    @property
    def firsts(self) -> list[int]:
        """Of the early one of its pieces."""
        return self.pieces[: len(self.held)]

    def _homes(self, rank: int) -> list[tuple[int, int]]:
        """Where a rank's pieces go, in the order of ranks, with their numbers."""
        last = 2 * len(self.held) - 1
        return sorted((min(piece, last - piece), piece) for piece in (2 * rank, 2 * rank + 1))

    def _traffic(self, rank: int) -> tuple[list[int], list[int]]:
        """How much of the sequence goes to each rank, and comes from each."""
        sent, received = [0] * len(self.held), [0] * len(self.held)
        for other in range(len(self.held)):
            for home, piece in self._homes(other):
                sent[home] += self.pieces[piece] if other == rank else 0
                received[other] += self.pieces[piece] if home == rank else 0
        return sent, received

    def deal(self, comm: Comm, x: torch.Tensor) -> torch.Tensor:
        """The pieces that this rank works on, for the part that it has."""
        sent, received = self._traffic(comm.index)
        halves = x.movedim(-2, 0).split(self.pieces[2 * comm.index :][:2])
        rows = torch.cat([halves[piece % 2] for _, piece in self._homes(comm.index)])
        return comm.exchange(rows, sent, received).movedim(0, -2)

    def collect(self, comm: Comm, x: torch.Tensor) -> torch.Tensor:
        """The other way."""
        sent, received = self._traffic(comm.index)
        rows = comm.exchange(x.movedim(-2, 0).contiguous(), received, sent, back=True)
        numbers = [piece for _, piece in self._homes(comm.index)]
        parts = dict(zip(numbers, rows.split([self.pieces[piece] for piece in numbers]), strict=True))
        return torch.cat([parts[piece] for piece in sorted(numbers)]).movedim(0, -2)


@dataclass(frozen=True, slots=True)
class _Ring:
    comm: Comm
    scale: float
    counts: Sequence[int]
    lengths: Sequence[int]  # of the sequence, by rank
    firsts: Sequence[int]  # of a causal one: of the early one of a rank's two pieces; none: all look at all

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide, made = accumulated(q.dtype), _like_result(q, v).zero_()
        total, lse = None, q.new_zeros(q.shape[:-1], dtype=wide)
        for origin, keys, values in self._round((k, v), "forward"):
            start, count = self._seen(origin)
            asked, keys, values = q[..., start:, :], keys[..., :count, :], values[..., :count, :]
            if not asked.numel() or not count:
                continue
            out, here = attend(asked, keys, values, self._diagonal(origin), self.scale, self.counts)
            if total is None:  # of the own keys, some of which every query here looks at
                total, lse = out.to(wide, copy=True), here.contiguous()
                continue
            before = lse[..., start:]
            both = torch.logaddexp(before, here)
            total[..., start:, :].lerp_(out.to(wide), (here - both).exp_().unsqueeze(-1))
            before.copy_(both)
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
            home, part = origin == self.comm.index, None
            start, count = self._seen(origin)
            if q[..., start:, :].numel() and count:
                given, asked, result = (x[..., start:, :] for x in (gradient, q, out))
                keys, values = keys[..., :count, :], values[..., :count, :]
                sums, diagonal = lse[..., start:].contiguous(), self._diagonal(origin)
                part = attend_back(given, asked, keys, values, result, sums, diagonal, self.scale, self.counts)
                of_queries[..., start:, :] += part[0]
            if work is not None:  # it was under way meanwhile
                work.wait()
                going, arriving = arriving, going
            if part is not None:
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

    def _seen(self, origin: int) -> tuple[int, int]:
        """From where on queries here look at keys of a rank, and at how many of these: in a causal sequence all look at
        the early piece of a rank before, and those of the late piece here at both of a rank behind."""
        mine = self.comm.index
        if not self.firsts or origin == mine:
            return 0, self.lengths[origin]
        return (0, self.firsts[origin]) if origin < mine else (self.firsts[mine], self.lengths[origin])

    def _diagonal(self, origin: int) -> bool:
        return bool(self.firsts) and origin == self.comm.index


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """In one piece of memory, with so many elements of the sequence."""
    if x.shape[-2] == length:
        return x.contiguous()
    whole = x.new_zeros((*x.shape[:-2], length, x.shape[-1]))
    whole.narrow(-2, 0, x.shape[-2]).copy_(x)
    return whole
