"""Helpers for operators with optional operands and with kernels that send statistics."""

from collections.abc import Iterable

from tapas.ir.graph import ITEMSIZE, Ref, Tensor
from tapas.rules.base import Call, Collective
from tapas.rules.labels import Term


def placed(call: Call, *arguments: tuple[int, str, Term | None]) -> list[Term | None]:
    """Labels per operand, from (position, name, labels) per argument; absent operands are skipped."""
    found: list[Term | None] = [None] * len(call.operands)
    for position, name, term in arguments:
        value = call.arg(position, name)
        if isinstance(value, Ref):
            found[value.index] = term
    return found


def number(call: Call, position: int, name: str) -> int | None:
    """Which operand an argument is."""
    value = call.arg(position, name)
    return value.index if isinstance(value, Ref) else None


def override(call: Call, operand: int | None, kind: str) -> tuple[str | None, ...]:
    """A kernel's states of operands: one of them differs from the default."""
    return tuple(kind if i == operand else None for i in range(len(call.operands)))


def real(labels: Iterable[str], shape: Iterable[int]) -> tuple[str, ...]:
    """The labels that become factors: dims of size one do not."""
    return tuple(label for label, size in zip(labels, shape, strict=True) if size > 1)


def wide(tensor: Tensor) -> int:
    """Bytes of a number that a sum is kept in."""
    return max(4, ITEMSIZE[tensor.dtype])


def sums(factors: tuple[str, ...], itemsize: int, forward: int = 1, backward: int = 0) -> tuple[Collective, ...]:
    """So many all-reduces of one size in each direction."""
    return tuple(Collective("all_reduce", factors, itemsize, i >= forward) for i in range(forward + backward))
