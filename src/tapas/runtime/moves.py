"""A move as an autograd function: the value goes old -> new, the gradient goes new -> old.

Every move owns its adjoint. Plain autograd would get the free ones wrong: going from R to P one rank keeps
the value and the others hold zeros, but the gradient of a partial sum is whole on all of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tapas.runtime import compiled_moves as compiled
from tapas.runtime.collectives import Rank
from tapas.runtime.redistribute import Conversion, convert
from tapas.sharding.layout import Layout
from tapas.sharding.route import Hop, Route, walked


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: "Step") -> torch.Tensor:
        ctx.step, ctx.hand_over = step, getattr(x, "hand_over", None)  # of a parameter, see gradients.py
        y = step.go(x, back=False)
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.hand_over is not None:  # whoever takes the gradient brings it to the parameter
            ctx.hand_over(ctx.step, grads[0])
            return None, None
        return ctx.step.go(grads[0], back=True), None


class Step(nn.Module):
    """One move of one tensor on one rank."""

    def __init__(self, move: Hop, ahead: Conversion, back: Conversion, rank: Rank) -> None:
        super().__init__()
        self.move, self.ahead, self.back, self.rank = move, ahead, back, rank
        self.number = compiled.register(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return compiled.move(x, self.number, False, list(self.ahead.shape(x.shape)), list(x.shape))
        return _Apply.apply(x, self)  # type: ignore[return-value]

    def go(self, x: torch.Tensor, back: bool) -> torch.Tensor:
        return self.back(x, self.rank, "backward") if back else self.ahead(x, self.rank, "forward")

    @property
    def only_sums_gradients(self) -> bool:
        """Nothing to do going forward, one all-reduce going back."""
        return self.move.old.value == self.move.new.value and self.back.kind == "all_reduce"

    @property
    def scatters_gradients(self) -> bool:
        """Going back, one reduce-scatter over one axis."""
        return self.back.kind == "reduce_scatter" and len(self.back.axes) == 1

    def extra_repr(self) -> str:
        move = self.move
        return f"{move.old} -> {move.new} over {move.axes}: {move.forward}, back {move.backward}"


def steps(shape: Sequence[int], layout: Layout, route: Route, rank: Rank) -> list[Step]:
    """The steps of a route, from a layout on."""
    moves = []
    for now, hop in walked(layout, route):
        ahead = convert(shape, now, hop.axes, hop.old.value, hop.new.value, rank)
        back = convert(shape, now, hop.axes, hop.new.gradient, hop.old.gradient, rank)
        moves.append(Step(hop, ahead, back, rank))
    return moves


class AxisComm:
    """What kernels use (`Comm` in kernels/common.py), on an axis."""

    def __init__(self, rank: Rank, axis: int) -> None:
        self.wire, self.axes, self.count = rank.wires[axis], (axis,), rank.count
        self.size, self.index = self.wire.size, self.wire.index
        self.number = compiled.register(self)

    def reduce(self, x: torch.Tensor, phase: str, how: str = "sum") -> torch.Tensor:
        self.count.add(phase, "all_reduce", self.axes, x.numel() * x.element_size())
        return self.wire.all_reduce(x, how)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return compiled.add_up(x, self.number)
        return _Sum.apply(x, self)  # type: ignore[return-value]

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return compiled.spread(x, self.number)
        return _Copy.apply(x, self)  # type: ignore[return-value]

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return compiled.reduce(x.detach(), self.number, "forward", "max")
        return self.reduce(x.detach(), "forward", "max")


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: AxisComm) -> torch.Tensor:
        return comm.reduce(x, "forward")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: AxisComm) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.comm.reduce(grads[0], "backward"), None
