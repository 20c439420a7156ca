"""A product and a move beside it, in pieces of the batch: some travel while others are computed.

What a product reads is gathered piece by piece: all pieces are sent for at once, and each is multiplied when it has
arrived. What it leaves is scattered piece by piece, each as soon as it is computed. Gradients go the same way back, as
autograd runs first what was called last: those of pieces that were gathered are scattered as soon as they are computed,
and those of pieces that were scattered are all sent for at once. In the meantime an empty tensor stands for a piece:
what autograd hands on in its place is not looked at.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from tapas.runtime.collectives import Passing
from tapas.runtime.moves import Step


class _Way:
    """One way of a step, there or back."""

    def __init__(self, step: Step, lengths: Sequence[int], path: str | None, back: bool) -> None:
        self.conversion, phase = (step.back, "backward") if back else (step.ahead, "forward")
        assert step.rank.side is not None
        self.side, self.count = step.rank.side, step.rank.count
        self.lengths, self.starts = lengths, [0, *accumulate(lengths)]
        self.passing = Passing(step.site, path, phase)
        self.result: torch.Tensor | None = None
        self.under_way: dict[int, tuple[Any, torch.Tensor, torch.Tensor]] = {}  # by piece: work, message, its place

    def piece(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return x.narrow(0, self.starts[i], self.lengths[i])

    def start(self, i: int, x: torch.Tensor) -> None:
        """Send a piece."""
        if self.result is None or i in self.under_way:  # the pass before this one failed half-way
            self.result = x.new_empty(self.conversion.shape((self.starts[-1], *x.shape[1:])))
            self.under_way = {}
        place = self.piece(self.result.data, i)  # .data: to write to one piece is no change of the others
        kind, packing, axes = self.conversion.kind, self.conversion.joint, self.conversion.axes
        if kind == "all_gather":
            flat = packing.pack_part(x)
            message = place.view(-1) if packing.arrives_whole(x.shape) else x.new_empty(place.numel())
            self._note(kind, x, flat, message)
            work = self.side.gather(axes, [message], [flat], self.passing)
        elif kind == "reduce_scatter":
            flat, message = packing.pack(x), place.view(-1)
            self._note(kind, x, flat, flat)
            work = self.side.scatter(axes, [message], [flat], self.passing)
        else:
            work, message = None, place.copy_(self.conversion.local(x)).view(-1)
        self.under_way[i] = work, message, place

    def _note(self, kind: str, x: torch.Tensor, flat: torch.Tensor, sent: torch.Tensor) -> None:
        self.count.add(self.passing.phase, kind, self.conversion.axes, sent.numel() * sent.element_size())
        self.count.copied(self.passing.phase, x, flat)

    def wait(self, i: int) -> torch.Tensor:
        """A piece that was sent, when it is there."""
        work, message, place = self.under_way.pop(i)
        if work is not None:
            work.wait()
        if message.data_ptr() != place.data_ptr():
            self.conversion.joint.unpack(message, self._before(place.shape), place)
            self.count.copies[self.passing.phase] += place.numel() > 0
        return place

    def _before(self, shape: torch.Size) -> tuple[int, ...]:
        """The shape of what was gathered to one of this shape."""
        deal = self.conversion.joint.deal
        return deal.shape(shape, deal.mine)

    def finish(self) -> torch.Tensor:
        for i in sorted(self.under_way):
            self.wait(i)
        result, self.result = self.result, None
        assert result is not None
        return result


class _Ways:
    """A step in pieces, in one forward pass and the backward passes through it."""

    def __init__(self, step: Step, lengths: Sequence[int]) -> None:
        path = step.rank.journal.path
        self.ahead, self.back = (_Way(step, lengths, path, back) for back in (False, True))
        self.lengths, self.pieces = tuple(lengths), range(len(lengths))


def _in_place_of(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(()).expand(x.shape)


class _SendFor(torch.autograd.Function):
    """All pieces of what is to be gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ways: _Ways) -> Any:
        ctx.ways = ways
        for i in ways.pieces:
            ways.ahead.start(i, ways.ahead.piece(x, i))
        return tuple(_in_place_of(ways.ahead.piece(x, i)) for i in ways.pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.ways.back.finish(), None


class _Arrive(torch.autograd.Function):
    """One piece of it."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, ways: _Ways, i: int) -> torch.Tensor:
        ctx.ways, ctx.i, ctx.shape = ways, i, sent.shape
        return ways.ahead.wait(i)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.ways.back.start(ctx.i, gradients[0])
        return gradients[0].new_empty(()).expand(ctx.shape), None, None


class _Join(torch.autograd.Function):
    """All of it, for others that read it: the pieces lie in one tensor."""

    @staticmethod
    def forward(ctx: Any, ways: _Ways, *pieces: torch.Tensor) -> torch.Tensor:
        ctx.lengths = ways.lengths
        return ways.ahead.finish()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *gradients[0].split(ctx.lengths)


class _Leave(torch.autograd.Function):
    """One piece of what is to be scattered."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, ways: _Ways, i: int) -> torch.Tensor:
        ctx.ways, ctx.i = ways, i
        ways.ahead.start(i, y)
        return _in_place_of(y)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.ways.back.wait(ctx.i), None, None


class _Collect(torch.autograd.Function):
    """All of them, when they are there."""

    @staticmethod
    def forward(ctx: Any, ways: _Ways, *sent: torch.Tensor) -> torch.Tensor:
        ctx.ways, ctx.shapes = ways, [piece.shape for piece in sent]
        return ways.ahead.finish()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ways, (gradient,) = ctx.ways, gradients
        for i in reversed(ways.pieces):  # the last one is needed first
            ways.back.start(i, ways.back.piece(gradient, i))
        ways.back.result = None  # it is taken piece by piece
        return None, *(gradient.new_empty(()).expand(shape) for shape in ctx.shapes)


class _Cut(torch.autograd.Function):
    """Pieces of what a product reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ways: _Ways) -> Any:
        ctx.count = ways.ahead.count
        return x.split(ways.lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.count.copies["backward"] += 1
        return torch.cat(gradients), None


class PiecedProduct(nn.Module):
    """Compiled, it is one piece: what is under way is nothing that torch.compile could follow."""

    def __init__(self, function: Callable[..., torch.Tensor], step: Step, lengths: Sequence[int]) -> None:
        super().__init__()
        self.function, self.step, self.lengths = function, step, tuple(lengths)


class GatheredProduct(PiecedProduct):
    """Of what has yet to be gathered; returns that, too."""

    def forward(self, x: torch.Tensor, *others: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling():
            whole = self.step(x)
            return self.function(whole, *others, **named), whole
        ways = _Ways(self.step, self.lengths)
        arrived, made = [], []
        for i, sent in enumerate(_SendFor.apply(x, ways)):  # type: ignore[arg-type]
            arrived.append(_Arrive.apply(sent, ways, i))
            made.append(self.function(arrived[-1], *others, **named))
        self.step.rank.count.copies["forward"] += 1
        return torch.cat(made), _Join.apply(ways, *arrived)  # type: ignore[return-value]


class ScatteredProduct(PiecedProduct):
    """Whose result is to be scattered."""

    def forward(self, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self.step(self.function(x, *others, **named))
        ways = _Ways(self.step, self.lengths)
        cut = enumerate(_Cut.apply(x, ways))  # type: ignore[arg-type]
        sent = [_Leave.apply(self.function(piece, *others, **named), ways, i) for i, piece in cut]
        return _Collect.apply(ways, *sent)  # type: ignore[return-value]
