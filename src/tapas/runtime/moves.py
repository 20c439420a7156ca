"""A move as an autograd function: the value goes old -> new, the gradient goes new -> old.

Every move owns its adjoint. Plain autograd would get the free ones wrong: going from R to P one rank keeps
the value and the others hold zeros, but the gradient of a partial sum is whole on all of them.

Programs that torch.compile has taken call the same moves as operators. Its tracer follows neither our autograd
functions nor the counting of bytes; an operator with a number in place of a move is one line to it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tapas._torch import in_backward
from tapas.runtime.collectives import Rank
from tapas.runtime.lost_ranks import Sent, Site, WireFailed, collective_failed
from tapas.runtime.numbered import numbered, register
from tapas.runtime.redistribute import convert
from tapas.sharding.layout import Layout
from tapas.sharding.route import Hop, Route, walked

NOWHERE = Site()


def own_memory(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What an operator returns must not be its argument, or a view of it."""
    shared = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return y.clone(memory_format=torch.contiguous_format) if shared else y.contiguous()


def compiled_in(rank: Rank) -> str | None:
    """The copy of a block in which compiled code is. In a backward pass it does not say: it would be compiled anew for
    each of them."""
    return None if in_backward() else rank.journal.path


@torch.library.custom_op("tapas::move", mutates_args=())
def compiled_move(x: torch.Tensor, number: int, back: bool, shape: list[int], before: list[int]) -> torch.Tensor:
    """Shapes after and before are arguments, because compiled code is cached by them from run to run."""
    step = numbered(number)
    return own_memory(step.go(x, back, compiled_in(step.rank)), x)


@compiled_move.register_fake
def _(x: torch.Tensor, number: int, back: bool, shape: list[int], before: list[int]) -> torch.Tensor:
    return x.new_empty(shape)


def _keep_move(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    _, ctx.number, _, ctx.shape, ctx.before = inputs


def _move_back(ctx: Any, grad: torch.Tensor) -> tuple:
    return compiled_move(grad, ctx.number, True, ctx.before, ctx.shape), None, None, None, None


compiled_move.register_autograd(_move_back, setup_context=_keep_move)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: "Step") -> torch.Tensor:
        ctx.step, ctx.path = step, step.rank.journal.path
        y = step.go(x, False, ctx.path)
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.step.go(grads[0], True, ctx.path), None


class Step(nn.Module):
    """One move of one tensor on one rank."""

    def __init__(self, shape: Sequence[int], layout: Layout, move: Hop, rank: Rank, site: Site = NOWHERE) -> None:
        """`layout`: the tensor's before the move; `site`: where in the model it happens."""
        super().__init__()
        self.move, self.rank, self.site = move, rank, site
        self.ahead = convert(shape, layout, move.axes, move.old.value, move.new.value, rank)
        self.back = convert(shape, layout, move.axes, move.new.gradient, move.old.gradient, rank)
        self.number = register(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return compiled_move(x, self.number, False, list(self.ahead.shape(x.shape)), list(x.shape))
        return _Apply.apply(x, self)  # type: ignore[return-value]

    def go(self, x: torch.Tensor, back: bool, path: str | None) -> torch.Tensor:
        """`path`: of the copy of a block in which it happens, if that is known."""
        try:
            return self.back(x, self.rank, "backward") if back else self.ahead(x, self.rank, "forward")
        except WireFailed as failure:
            phase, conversion = ("backward", self.back) if back else ("forward", self.ahead)
            place, nbytes = self.site.within(path), x.numel() * x.element_size()
            sent = Sent(place, conversion.kind, conversion.axes, nbytes, phase, self.rank.count.number)
            raise collective_failed(sent, failure.ranks, failure.error) from failure.error

    @property
    def only_sums_gradients(self) -> bool:
        """Nothing to do going forward, one all-reduce going back."""
        return self.move.old.value == self.move.new.value and self.back.kind == "all_reduce"

    def extra_repr(self) -> str:
        move = self.move
        return f"{move.old} -> {move.new} over {move.axes}: {move.forward}, back {move.backward}"


def steps(shape: Sequence[int], layout: Layout, route: Route, rank: Rank, site: Site = NOWHERE) -> list[Step]:
    """The steps of a route, from a layout on."""
    return [Step(shape, before, hop, rank, site) for before, hop in walked(layout, route)]
