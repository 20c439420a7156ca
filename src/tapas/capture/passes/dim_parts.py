"""Dims as products of parts: what a reshape merges and what it takes apart.

A tensor of shape [6, 32, 8] that was made from [6, 8, 4, 8] has the groups ((6,), (8, 4), (8,)): one for
each dim, major part first. A dim of one element is the group (1,).
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch

from tapas.capture.calls import ExportedCall, FlatProgram, Value

aten = torch.ops.aten

Group = tuple[int, ...]
Groups = tuple[Group, ...]


def alone(shape: Iterable[int]) -> Groups:
    return tuple((size,) for size in shape)


def flat(groups: Groups) -> tuple[int, ...]:
    return tuple(part for group in groups for part in group)


def merged(groups: Groups) -> bool:
    return any(len(group) > 1 for group in groups)


def regroup(groups: Groups, shape: Sequence[int]) -> Groups | None:
    """The parts, cut further where the shape asks for it, dealt out to the dims of a shape."""
    waiting = [part for part in reversed(flat(groups)) if part != 1]
    found: list[Group] = []
    for size in shape:
        group: list[int] = []
        while size > 1:
            part = waiting.pop()
            if part > size:
                if part % size:
                    return None
                waiting.append(part // size)
                part = size
            if size % part:
                return None
            group.append(part)
            size //= part
        found.append(tuple(group) or (size,))
    return tuple(found) if not waiting else None


def common(groups: Sequence[Group]) -> Group | None:
    """The parts of a dim that fit all of these groups."""
    cuts = sorted({prod(group[i:]) for group in groups for i in range(len(group) + 1)}, reverse=True)
    if any(high % low for high, low in pairwise(cuts)):
        return None
    return tuple(high // low for high, low in pairwise(cuts)) or (1,)


def rename(call: ExportedCall, now: dict[str, str]) -> None:
    """Let a call read what tensors have become."""

    call.read(lambda value: Value(now.get(value.name, value.name)))


class CallWriter:
    """Collects calls; those that only change the shape of one tensor are made once each."""

    def __init__(self, program: FlatProgram) -> None:
        self.program = program
        self.calls: list[ExportedCall] = []
        self._made: dict[tuple[str, tuple[int, ...], bool], str] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.program.meta[name].shape)

    def name(self, wish: str, shape: Sequence[int], dtype: torch.dtype) -> str:
        name = self.program.unique(wish)
        self.program.meta[name] = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return name

    def reshape(self, name: str, shape: tuple[int, ...], like: ExportedCall) -> str:
        if self.shape(name) == shape:
            return name
        key = name, shape, like.grad
        if key not in self._made:
            self._made[key] = self.name(f"{name}.reshape", shape, self.program.meta[name].dtype)
            self.add(like, aten.reshape.default, (Value(name), shape), (self._made[key],))
        return self._made[key]

    def permute(self, name: str, order: Sequence[int], like: ExportedCall) -> str:
        if list(order) == sorted(order):
            return name
        shape = self.shape(name)
        made = self.name(f"{name}.permute", [shape[d] for d in order], self.program.meta[name].dtype)
        self.add(like, aten.permute.default, (Value(name), tuple(order)), (made,))
        return made

    def add(self, like: ExportedCall, target: object, args: tuple, results: tuple[str, ...], **kwargs: Any) -> None:
        """A call at the place of another one."""
        self.calls.append(like.at_its_place(target, args, results, **kwargs))
