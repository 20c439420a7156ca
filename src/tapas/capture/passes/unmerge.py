"""Operators on merged dims, put back on the dims they were merged from.

nn.MultiheadAttention merges batch and heads to one dim for its products, and sequence and batch for the
linear layer after them. What is the minor part of a dim cannot be split. Most operators do not care
whether two dims are one: between a reshape that merges dims and one that takes the same dims apart
again, they run on the dims themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tapas.capture.calls import ExportedCall, FlatProgram, Value, operands
from tapas.capture.passes.dim_parts import CallWriter, Group, Groups, alone, common, flat, merged, regroup, rename

aten = torch.ops.aten
_EACH_ELEMENT = (aten.dropout.default, aten.to.dtype, aten.contiguous.default)  # besides what torch calls pointwise


@dataclass(frozen=True, slots=True)
class _CallOnParts:
    """A call on the parts of its dims: how it reads its operands, and what its result looks like."""

    call: ExportedCall
    reads: tuple[Groups, ...]  # one for each operand
    groups: Groups  # of the result
    write: Callable[["_CallOnParts", list[str], str, CallWriter], None] | None  # None: the operand is all there is


class _MergedRegions:
    def __init__(self, calls: list[ExportedCall], program: FlatProgram) -> None:
        self.program = program
        self.fixed: set[str] = set()  # constants: whoever reads them may have them in any shape
        self.made = {name for call in calls for name in call.results}
        self.lifted: dict[str, _CallOnParts] = {}  # by result
        self.ends: dict[str, Groups] = {}  # reshapes that take apart what was merged: groups of their source
        self.needed: set[str] = set()
        for call in calls:
            names = operands(call)
            if self.fixed.issuperset(names):
                self.fixed.update(call.results)
            # all else can only go on with what was merged before
            if call.target is aten.reshape.default or not self.lifted.keys().isdisjoint(names):
                self.look(call, names)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.program.meta[name].shape)

    def groups(self, name: str, grad: bool) -> Groups:
        found = self.lifted.get(name)
        return found.groups if found is not None and found.call.grad == grad else alone(self.shape(name))

    def look(self, call: ExportedCall, names: list[str]) -> None:
        if len(call.results) != 1:
            return
        before = [self.groups(name, call.grad) for name in names]
        if call.target is not aten.reshape.default and not any(map(merged, before)):
            return
        lift = _LIFTS.get(call.opname)
        if torch.Tag.pointwise in call.target.tags or call.target in _EACH_ELEMENT:
            lift = _pointwise
        shape = self.shape(call.results[0])
        if lift is None or 0 in shape:
            return
        found = lift(call, before, shape)
        if found is None or any(
            name in self.made and name not in self.fixed and _opens(*each)
            for name, *each in zip(names, before, found.reads, strict=True)
            if found.write is not None
        ):
            return
        if call.target is aten.reshape.default and _separates(before[0], found.groups):
            self.ends[call.results[0]] = before[0]
            self.need(names[0])
        if merged(found.groups):
            self.lifted[call.results[0]] = found

    def need(self, name: str) -> None:
        """Make a tensor in parts, and all that it is made from."""
        waiting = [name]
        while waiting:
            name = waiting.pop()
            if name in self.needed or name not in self.lifted:
                continue
            self.needed.add(name)
            call = self.lifted[name].call
            waiting += [n for n in operands(call) if n in self.lifted and self.lifted[n].call.grad == call.grad]


def _opens(before: Groups, after: Groups) -> bool:
    """Whether an operand is taken apart only for the sake of another one, such as the stream that a layer's
    output is added to: that would spread from layer to layer."""
    return any(len(one) == 1 and one != (1,) and len(two) > 1 for one, two in zip(before, after, strict=True))


def _separates(before: Groups, after: Groups) -> bool:
    """Whether a reshape takes merged dims apart: each part of such a dim comes to a dim of its own."""
    home = [dim for dim, group in enumerate(after) for part in group if part != 1]
    if len(home) != sum(part != 1 for part in flat(before)):
        parts = regroup(after, tuple(p for p in flat(before) if p != 1))  # some parts were cut further
        assert parts is not None
        spread, position = [], 0
        for part in parts:
            spread.append(home[position])
            position += len(part)
        home = spread
    found, position = False, 0
    for group in before:
        count = sum(part != 1 for part in group)
        homes = len(set(home[position : position + count]))
        position += count
        if homes not in (0, 1, count):
            return False
        found |= count > 1 and homes == count
    return found


def unmerge(calls: list[ExportedCall], program: FlatProgram, outputs: tuple[str, ...]) -> list[ExportedCall]:
    regions = _MergedRegions(calls, program)
    if not regions.needed:
        return calls
    writer = CallWriter(program)
    parts: dict[str, str] = {}  # a tensor that is made in parts -> the tensor of these parts
    now: dict[str, str] = {}
    for call in calls:
        name = call.results[0]
        sources = operands(call)
        rename(call, now)
        if name in regions.needed:
            lifted = regions.lifted[name]
            read = [
                writer.reshape(parts.get(source, now.get(source, source)), flat(groups), call)
                for source, groups in zip(sources, lifted.reads, strict=True)
            ]
            made = read[0]
            if lifted.write is not None:
                made = writer.name(f"{name}.apart", flat(lifted.groups), program.meta[name].dtype)
                lifted.write(lifted, read, made, writer)
            parts[name] = made
            writer.add(call, aten.reshape.default, (Value(made), regions.shape(name)), (name,))
        elif name in regions.ends and name in outputs:  # keeps its name
            writer.add(call, aten.reshape.default, (Value(parts[sources[0]]), regions.shape(name)), (name,))
        elif name in regions.ends:
            now[name] = writer.reshape(parts[sources[0]], regions.shape(name), call)
        else:
            writer.calls.append(call)
    return writer.calls


# ---------------------------------------------------------------------------------------------
# How each operator reads and writes parts; None where it cannot


def _whole(groups: Groups, *dims: int) -> Groups:
    """With some dims in one piece."""
    made = list(groups)
    for dim in dims:
        size = 1
        for part in made[dim]:
            size *= part
        made[dim] = (size,)
    return tuple(made)


def _same(lifted: _CallOnParts, read: list[str], made: str, writer: CallWriter) -> None:
    """The same operator on the parts."""
    names = iter(read)
    call = lifted.call
    writer.add(call, call.target, call.args, (made,), **call.kwargs)
    writer.calls[-1].read(lambda _: Value(next(names)))


def _reshape(call: ExportedCall, before: list[Groups], shape: tuple[int, ...]) -> _CallOnParts | None:
    groups = regroup(before[0], shape)
    return None if groups is None else _CallOnParts(call, (groups,), groups, None)


def _permute(call: ExportedCall, before: list[Groups], shape: tuple[int, ...]) -> _CallOnParts | None:
    rank = len(shape)
    order = list(range(rank))
    if call.opname == "permute":
        order = [d % rank for d in call.args[1]]
    else:
        one, two = (d % rank for d in call.args[1:])
        order[one], order[two] = two, one

    def write(lifted: _CallOnParts, read: list[str], made: str, writer: CallWriter) -> None:
        first, numbers = 0, []
        for group in before[0]:
            numbers.append(range(first, first + len(group)))
            first += len(group)
        turned = tuple(n for d in order for n in numbers[d])
        writer.add(call, aten.permute.default, (Value(read[0]), turned), (made,))

    return _CallOnParts(call, (before[0],), tuple(before[0][d] for d in order), write)


def _pointwise(call: ExportedCall, before: list[Groups], shape: tuple[int, ...]) -> _CallOnParts | None:
    groups: list[Group] = []
    for back in range(len(shape), 0, -1):
        dims = [g[-back] for g in before if len(g) >= back and (g[-back] != (1,) or shape[-back] == 1)]
        found = common(dims) if dims else (shape[-back],)
        if found is None:
            return None
        groups.append(found)
    reads = []
    for read in before:
        last = groups[len(shape) - len(read) :]
        reads.append(tuple(g if own != (1,) else (1,) * len(g) for own, g in zip(read, last, strict=True)))
    return _CallOnParts(call, tuple(reads), tuple(groups), _same)


def _softmax(call: ExportedCall, before: list[Groups], shape: tuple[int, ...]) -> _CallOnParts | None:
    dim = call.args[1] % len(shape)
    groups = _whole(before[0], dim)

    def write(lifted: _CallOnParts, read: list[str], made: str, writer: CallWriter) -> None:
        args = (Value(read[0]), len(flat(groups[:dim])), *call.args[2:])
        writer.add(call, call.target, args, (made,), **call.kwargs)

    return _CallOnParts(call, (groups,), groups, write) if merged(groups) else None


def _linear(call: ExportedCall, before: list[Groups], shape: tuple[int, ...]) -> _CallOnParts | None:
    if any(map(merged, before[1:])) or len(shape) < 2:
        return None
    rows = _whole(before[0], -1)
    return _CallOnParts(call, (rows, *before[1:]), (*rows[:-1], (shape[-1],)), _same)


def _mm(call: ExportedCall, before: list[Groups], shape: tuple[int, ...]) -> _CallOnParts | None:
    if merged(before[1]):
        return None
    rows = _whole(before[0], 1)
    return _CallOnParts(call, (rows, before[1]), (rows[0], (shape[1],)), _as_matmul)


def _as_matmul(lifted: _CallOnParts, read: list[str], made: str, writer: CallWriter) -> None:
    writer.add(lifted.call, aten.matmul.default, tuple(map(Value, read)), (made,))


def _bmm(call: ExportedCall, before: list[Groups], shape: tuple[int, ...]) -> _CallOnParts | None:
    """One matrix for each element of the batch: only the batch is taken apart."""
    if any(len(groups) != 3 for groups in before):
        return None
    batch = common([groups[0] for groups in before])
    if batch is None or len(batch) < 2:
        return None
    reads = tuple((batch, *_whole(groups, 1, 2)[1:]) for groups in before)
    return _CallOnParts(call, reads, (batch, (shape[1],), (shape[2],)), _as_matmul)


def _baddbmm(call: ExportedCall, before: list[Groups], shape: tuple[int, ...]) -> _CallOnParts | None:
    """beta * added + alpha * left @ right: a product and a sum."""
    if len(call.args) != 3 or len(before) != 3 or len(before[0]) > 3:
        return None
    alpha, beta = (call.kwargs.get(name, 1) for name in ("alpha", "beta"))
    product = _bmm(call, before[1:], shape)
    if product is None:
        return None
    batch = product.groups[0]
    added = before[0]
    if len(added) == 3:
        fits = added[0] if added[0] == (1,) else common([added[0], batch])
        if fits not in ((1,), batch):
            return None
        added = (((1,) * len(batch)) if fits == (1,) else batch, *_whole(added, 1, 2)[1:])

    def write(lifted: _CallOnParts, read: list[str], made: str, writer: CallWriter) -> None:
        name, dtype = call.results[0], writer.program.meta[made].dtype
        bare = writer.name(f"{name}.product", flat(product.groups), dtype)
        other, left, right = map(Value, read)
        if alpha != 1:  # there are fewer numbers in an operand than in the product
            scaled = writer.name(f"{name}.scaled", flat(product.reads[0]), dtype)
            writer.add(call, aten.mul.Tensor, (left, alpha), (scaled,))
            left = Value(scaled)
        writer.add(call, aten.matmul.default, (left, right), (bare,))
        scale = {} if beta == 1 else {"alpha": beta}
        writer.add(call, aten.add.Tensor, (Value(bare), other), (made,), **scale)

    return _CallOnParts(call, (added, *product.reads), product.groups, write)


def _attention(call: ExportedCall, before: list[Groups], shape: tuple[int, ...]) -> _CallOnParts | None:
    """Heads that were made part of the batch."""
    if len(before) != 3 or any(isinstance(a, Value) for a in call.args[3:]):
        return None
    found = _bmm(call, before, shape)
    return None if found is None else _CallOnParts(call, found.reads, found.groups, _same)


_Lift = Callable[[ExportedCall, list[Groups], tuple[int, ...]], _CallOnParts | None]
_LIFTS: dict[Any, _Lift] = {
    "reshape": _reshape, "unsqueeze": _reshape, "squeeze": _reshape, "permute": _permute, "transpose": _permute,
    "softmax": _softmax, "_softmax": _softmax, "linear": _linear, "mm": _mm, "bmm": _bmm, "baddbmm": _baddbmm,
    "scaled_dot_product_attention": _attention,
}  # fmt: skip
