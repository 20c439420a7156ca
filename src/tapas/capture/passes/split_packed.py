"""Tensors packed in one dim, told apart by a split of that dim.

Attention layers view [.., 3 * features] as [.., 3, features], move the 3 to the front and select Q, K and V
from it. In that form the features are the minor part of a dim and cannot be split. A split of the packed
dim gives the same three tensors, each of which has its features in a dim of its own.
"""

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from tapas.capture.calls import ExportedCall, FlatProgram, Value
from tapas.capture.passes.dim_parts import CallWriter, alone, regroup, rename

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _PackedView:
    """A tensor as a view of another one: the parts of the base's dims, and where each of them is now."""

    base: str
    grad: bool
    parts: tuple[tuple[int, ...], ...]  # numbers of the parts in each dim of the base
    sizes: dict[int, int]
    dims: tuple[tuple[int, ...], ...]  # the same for each dim of the view; dims of one element are ()

    def shape(self) -> tuple[int, ...]:
        return tuple(prod(self.sizes[p] for p in dim) for dim in self.dims)


def _whole(name: str, shape: tuple[int, ...], grad: bool) -> _PackedView:
    dims = tuple((d,) if size != 1 else () for d, size in enumerate(shape))
    return _PackedView(name, grad, dims, dict(enumerate(shape)), dims)


def _reshaped(seen: _PackedView, shape: tuple[int, ...]) -> _PackedView | None:
    order = [p for dim in seen.dims for p in dim]
    groups = regroup(alone(seen.sizes[p] for p in order), shape)
    if groups is None:
        return None
    sizes, dims = dict(seen.sizes), []
    cut: dict[int, list[int]] = {p: [] for p in order}  # a part -> what it is made of now
    left = {p: sizes[p] for p in order}
    waiting = iter(order)
    part = next(waiting, None)
    for group in groups:
        dim = []
        for size in group:
            if size == 1:
                continue
            assert part is not None
            number = part if size == sizes[part] else max(sizes) + 1
            sizes[number] = size
            cut[part].append(number)
            left[part] //= size
            dim.append(number)
            if left[part] == 1:
                part = next(waiting, None)
        dims.append(tuple(dim))
    parts = tuple(tuple(n for p in dim for n in cut.get(p, [p])) for dim in seen.parts)
    return _PackedView(seen.base, seen.grad, parts, sizes, tuple(dims))


def _permuted(seen: _PackedView, order: list[int]) -> _PackedView:
    return _PackedView(seen.base, seen.grad, seen.parts, seen.sizes, tuple(seen.dims[d] for d in order))


def _view(call: ExportedCall, seen: _PackedView, shape: tuple[int, ...]) -> _PackedView | None:
    """The result of a call on a tensor seen like this, if it moves no values."""
    opname, rank = call.opname, len(seen.dims)
    if opname in ("reshape", "unsqueeze", "squeeze"):
        return _reshaped(seen, shape)
    if opname == "permute":
        return _permuted(seen, [d % rank for d in call.args[1]])
    if opname == "transpose":
        order = list(range(rank))
        one, two = (d % rank for d in call.args[1:])
        order[one], order[two] = two, one
        return _permuted(seen, order)
    return None


@dataclass(frozen=True, slots=True)
class _PartSelection:
    """A call that takes one element (or each of them) of a part that is the major one of a dim of the base."""

    seen: _PackedView
    dim: int  # of the view
    at: int  # dim of the base
    count: int
    chosen: tuple[int, ...]


def split_packed(calls: list[ExportedCall], program: FlatProgram, outputs: tuple[str, ...]) -> list[ExportedCall]:
    """reshape, permute, select (or unbind) -> split, reshape, permute."""
    picks = _picks(calls, program, outputs)
    if not picks:
        return calls
    writer = CallWriter(program)
    now: dict[str, str] = {}
    made: dict[tuple[str, int, int], tuple[str, ...]] = {}
    for call in calls:
        rename(call, now)
        pick = picks.get(call.results[0])
        if pick is None:
            writer.calls.append(call)
            continue
        key = pick.seen.base, pick.at, pick.count
        if key not in made:
            made[key] = _split(pick, now.get(pick.seen.base, pick.seen.base), call, writer)
        for index, name in zip(pick.chosen, call.results, strict=True):
            now[name] = _unpacked(pick, made[key][index], call, writer)
    return writer.calls


def _picks(calls: list[ExportedCall], program: FlatProgram, outputs: tuple[str, ...]) -> dict[str, _PartSelection]:
    """By the first result of the call. Only where all elements are picked, and none leaves the graph."""
    seen: dict[str, _PackedView] = {}
    found: dict[str, _PartSelection] = {}
    made = {name for call in calls for name in call.results}
    for call in calls:
        first = call.args[0] if call.args and isinstance(call.args[0], Value) else None
        if first is None or first.name not in made or call.kwargs:
            continue
        shape = tuple(program.meta[first.name].shape)
        known = seen.get(first.name)
        if known is None or known.grad != call.grad:
            known = _whole(first.name, shape, call.grad)
        if call.target in (aten.select.int, aten.unbind.int):
            pick = _pick(call, known, shape)
            if pick is not None and set(outputs).isdisjoint(call.results):
                found[call.results[0]] = pick
            continue
        if len(call.results) == 1 and prod(shape):
            view = _view(call, known, tuple(program.meta[call.results[0]].shape))
            if view is not None:
                seen[call.results[0]] = view
    chosen: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    for pick in found.values():
        chosen[pick.seen.base, pick.at, pick.count].update(pick.chosen)
    return {
        name: pick for name, pick in found.items() if len(chosen[pick.seen.base, pick.at, pick.count]) == pick.count
    }


def _pick(call: ExportedCall, seen: _PackedView, shape: tuple[int, ...]) -> _PartSelection | None:
    args: Any = call.args
    dim = (args[1] if len(args) > 1 else 0) % len(shape)
    if len(seen.dims[dim]) != 1 or shape[dim] < 2:
        return None
    part = seen.dims[dim][0]
    at = next(d for d, parts in enumerate(seen.parts) if part in parts)
    if seen.parts[at][0] != part or len(seen.parts[at]) < 2:
        return None
    count = shape[dim]
    chosen = (args[2] % count,) if call.target is aten.select.int else tuple(range(count))
    return _PartSelection(seen, dim, at, count, chosen)


def _split(pick: _PartSelection, base: str, call: ExportedCall, writer: CallWriter) -> tuple[str, ...]:
    shape, dtype = list(writer.shape(base)), writer.program.meta[base].dtype
    shape[pick.at] //= pick.count
    names = tuple(writer.name(f"{base}.split.{i}", shape, dtype) for i in range(pick.count))
    writer.add(call, aten.split.Tensor, (Value(base), shape[pick.at], pick.at), names)
    return names


def _unpacked(pick: _PartSelection, name: str, call: ExportedCall, writer: CallWriter) -> str:
    """One of the tensors of a split, in the shape that the pick gave it."""
    seen, part = pick.seen, pick.seen.dims[pick.dim][0]
    stored = [p for dim in seen.parts for p in dim if p != part]
    wanted = [p for d, dim in enumerate(seen.dims) if d != pick.dim for p in dim]
    shape = tuple(size for d, size in enumerate(seen.shape()) if d != pick.dim)
    if wanted == stored:
        return writer.reshape(name, shape, call)
    name = writer.reshape(name, tuple(seen.sizes[p] for p in stored), call)
    name = writer.permute(name, [stored.index(p) for p in wanted], call)
    return writer.reshape(name, shape, call)
