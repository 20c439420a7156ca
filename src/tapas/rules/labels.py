"""Small helpers that rules share: labels for dims, broadcasting, and arguments in any spelling."""

from collections.abc import Sequence
from typing import Any

from tapas.ir.graph import refs
from tapas.rules.base import Arguments, Call, Local

Term = list[list[str]]  # the labels of one tensor: per dim, major first


def names(count: int) -> Term:
    """d0, d1, ...: one label a dim."""
    return [[f"d{i}"] for i in range(count)]


def broadcast(shape: Sequence[int], whole: Sequence[int]) -> Term:
    """Labels of a tensor that is broadcast to `whole`: its dims are the last ones, `1` where it is repeated."""
    skipped = len(whole) - len(shape)
    return [[f"d{i + skipped}"] if size == whole[i + skipped] else ["1"] for i, size in enumerate(shape)]


def blocked(term: Term, dims: Sequence[int]) -> Term:
    """The same labels, with those of some dims never split."""
    return [["!" + label for label in labels] if d in dims else labels for d, labels in enumerate(term)]


def wrap(dim: int, rank: int) -> int:
    return dim + max(rank, 1) if dim < 0 else dim


def dims_of(value: Any, rank: int) -> tuple[int, ...]:
    """A dim argument as non-negative dims: None and () mean all of them."""
    if value is None or value == ():
        return tuple(range(rank))
    listed = value if isinstance(value, tuple) else (value,)
    return tuple(wrap(d, rank) for d in listed) if rank else ()


def distinct(call: Call) -> bool:
    """Each operand stands in the arguments once: x * x as one operand is not linear in x."""
    used = [i for value in (*call.args, *(v for _, v in call.kwargs)) for i in refs(value)]
    return len(used) == len(set(used))


def is_number(value: Any, *wanted: float) -> bool:
    return isinstance(value, (int, float)) and value in wanted


def replaced(call: Call, index: int, name: str, value: Any) -> Arguments:
    """The call's arguments with one of them changed, in the spelling it was given in."""
    if index < len(call.args):
        return (*call.args[:index], value, *call.args[index + 1 :]), call.kwargs
    return call.args, (*((k, v) for k, v in call.kwargs if k != name), (name, value))


def within(pieces: Sequence[tuple[int, int]], start: int, stop: int) -> int:
    """How many of a rank's elements lie in start:stop of the whole dim."""
    return sum(max(0, min(stop, high) - max(start, low)) for low, high in pieces)


def result_size(local: Local) -> Arguments:
    """For operators whose second argument is the size of the result."""
    return replaced(local.call, 1, "size", local.result_shape())
