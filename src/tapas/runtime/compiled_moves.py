"""The same moves as operators of their own, for programs that torch.compile has taken.

Its tracer follows neither our autograd functions nor the counting of bytes; an operator with a number in
place of a move is one line to it. The number stands for the move in this process.
"""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

_numbers = count()
_known: WeakValueDictionary[int, Any] = WeakValueDictionary()


def register(what: Any) -> int:
    number = next(_numbers)
    _known[number] = what
    return number


def _own(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What an operator returns must not be its argument, or a view of it."""
    shared = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return y.clone(memory_format=torch.contiguous_format) if shared else y.contiguous()


@torch.library.custom_op("tapas::move", mutates_args=())
def move(x: torch.Tensor, number: int, back: bool, shape: list[int], before: list[int]) -> torch.Tensor:
    """Shapes after and before are arguments, because compiled code is cached by them from run to run."""
    return _own(_known[number].go(x, back), x)


@move.register_fake
def _(x: torch.Tensor, number: int, back: bool, shape: list[int], before: list[int]) -> torch.Tensor:
    return x.new_empty(shape)


def _keep_move(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    _, ctx.number, _, ctx.shape, ctx.before = inputs


def _move_back(ctx: Any, grad: torch.Tensor) -> tuple:
    return move(grad, ctx.number, True, ctx.before, ctx.shape), None, None, None, None


move.register_autograd(_move_back, setup_context=_keep_move)


def _keep_number(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    ctx.number = inputs[1]


@torch.library.custom_op("tapas::reduce", mutates_args=())
def reduce(x: torch.Tensor, number: int, phase: str, how: str) -> torch.Tensor:
    return _own(_known[number].reduce(x, phase, how), x)


@reduce.register_fake
def _(x: torch.Tensor, number: int, phase: str, how: str) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("tapas::add_up", mutates_args=())
def add_up(x: torch.Tensor, number: int) -> torch.Tensor:
    return _own(_known[number].reduce(x, "forward"), x)


@add_up.register_fake
def _(x: torch.Tensor, number: int) -> torch.Tensor:
    return x.new_empty(x.shape)


add_up.register_autograd(lambda ctx, grad: (grad, None))


@torch.library.custom_op("tapas::spread", mutates_args=())
def spread(x: torch.Tensor, number: int) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@spread.register_fake
def _(x: torch.Tensor, number: int) -> torch.Tensor:
    return x.new_empty(x.shape)


spread.register_autograd(
    lambda ctx, grad: (reduce(grad, ctx.number, "backward", "sum"), None), setup_context=_keep_number
)
