"""A move as an autograd function: the value goes old -> new, the gradient goes new -> old.

Every move owns its adjoint. Plain autograd would get the free ones wrong: going from R to P one rank keeps
the value and the others hold zeros, but the gradient of a partial sum is whole on all of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tapas.layout import Layout
from tapas.routing import Move
from tapas.spmd.convert import Conversion, convert
from tapas.spmd.wire import Axis, Count


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: "Step") -> torch.Tensor:
        ctx.step = step
        y = step.ahead(x, step.wires, "forward", step.count)
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        step = ctx.step
        return step.back(grads[0], step.wires, "backward", step.count), None


class Step(nn.Module):
    """One move of one tensor on one rank."""

    def __init__(
        self, move: Move, ahead: Conversion, back: Conversion, wires: Sequence[Axis], count: Count | None
    ) -> None:
        super().__init__()
        self.move, self.ahead, self.back, self.wires, self.count = move, ahead, back, wires, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Apply.apply(x, self)  # type: ignore[return-value]

    @property
    def only_sums_gradients(self) -> bool:
        """Nothing to do going forward, one all-reduce going back."""
        return self.move.old.value == self.move.new.value and self.back.kind == "all_reduce"

    def extra_repr(self) -> str:
        move = self.move
        return f"{move.old} -> {move.new} over {move.axes}: {move.forward}, back {move.backward}"


def steps(
    shape: Sequence[int], layout: Layout, moves: Sequence[Move], mesh: Sequence[int], coord: Sequence[int],
    wires: Sequence[Axis], count: Count | None,
) -> list[Step]:  # fmt: skip
    """The moves of a route, from a layout on."""
    found, now = [], layout
    for move in moves:
        ahead = convert(shape, now, move.axes, move.old.value, move.new.value, mesh, coord)
        back = convert(shape, now, move.axes, move.new.gradient, move.old.gradient, mesh, coord)
        found.append(Step(move, ahead, back, wires, count))
        now = tuple(move.new if a in move.axes else s for a, s in enumerate(now))
    return found


class AxisComm:
    """What kernels use (see comm.py), on an axis."""

    def __init__(self, axis: Axis, number: int, count: Count | None) -> None:
        self.axis, self.size, self.index, self.number, self.count = axis, axis.size, axis.index, number, count

    def note(self, x: torch.Tensor, phase: str) -> None:
        if self.count is not None:
            self.count.add(phase, "all_reduce", (self.number,), x.numel() * x.element_size())

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(x, self)  # type: ignore[return-value]

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        return _Copy.apply(x, self)  # type: ignore[return-value]

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        self.note(x, "forward")
        return self.axis.all_reduce(x.detach(), "max")


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: AxisComm) -> torch.Tensor:
        comm.note(x, "forward")
        return comm.axis.all_reduce(x)

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
        ctx.comm.note(grads[0], "backward")
        return ctx.comm.axis.all_reduce(grads[0]), None
