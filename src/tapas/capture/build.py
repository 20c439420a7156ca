"""From functional calls to the Graph: dead calls out, constants into the prelude, names and flags set."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from tapas.capture.calls import Call, Program, Value, operands
from tapas.capture.gradients import differentiable
from tapas.capture.places import module_of, source_of
from tapas.capture.rewrite import keyword_items, plain
from tapas.graph import Graph, Leaf, Op, Ref, Tensor


@dataclass(frozen=True, slots=True)
class Pieces:
    """What build needs besides the calls."""

    leaves: tuple[Leaf, ...]
    outputs: tuple[str, ...]
    loss: str | None
    trainable: frozenset[str]  # leaves that want a gradient
    mutated: frozenset[str]  # leaves that are written to
    name: str


def build(calls: list[Call], program: Program, pieces: Pieces) -> Graph:
    calls = _alive(calls, pieces.outputs)
    fixed = _constants(calls, pieces)
    rest = [call for call in calls if call.results[0] not in fixed]
    prelude = [_op(call) for call in calls if call.results[0] in fixed]
    ops = [_op(call) for call in rest]
    tensors = {leaf.tensor: _tensor(leaf.tensor, program) for leaf in pieces.leaves}
    for call in calls:
        tensors.update((name, _tensor(name, program)) for name in call.results)
    if pieces.loss is not None:
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        no_grad = {call.results[0] for call in rest if not call.grad}
        for name in differentiable(ops, dtypes, pieces.trainable, no_grad, pieces.loss):
            tensors[name] = replace(tensors[name], differentiable=True)
    prelude, now = _share(prelude)
    ops, now = _drop_detach(ops, now, tensors)
    outputs = tuple(now.get(name, name) for name in pieces.outputs)
    leaves = pieces.leaves + _constant_leaves(ops, outputs, fixed)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in now}
    trimmed = max(program.total - len(ops) - len(prelude), 0)
    return Graph(tensors, leaves, tuple(ops), outputs, pieces.loss, tuple(prelude), pieces.name, trimmed)


def _alive(calls: list[Call], outputs: tuple[str, ...]) -> list[Call]:
    needed, alive = set(outputs), []
    for call in reversed(calls):
        if not needed.isdisjoint(call.results):
            alive.append(call)
            needed.update(operands(call))
    return alive[::-1]


def _constants(calls: list[Call], pieces: Pieces) -> set[str]:
    """Results that depend on constants and unwritten buffers only, random ones excepted."""
    held = {leaf.tensor for leaf in pieces.leaves if leaf.kind in ("buffer", "constant")} - pieces.mutated
    fixed: set[str] = set()
    for call in calls:
        known = all(name in held or name in fixed for name in operands(call))
        if known and torch.Tag.nondeterministic_seeded not in call.target.tags:
            fixed.update(call.results)
    return fixed


def _op(call: Call) -> Op:
    names: list[str] = []

    def convert(tree: Any) -> Any:
        if isinstance(tree, Value):
            names.append(tree.name)
            return Ref(len(names) - 1)
        if isinstance(tree, (list, tuple)):
            return tuple(convert(item) for item in tree)
        return plain(tree)

    args = tuple(convert(argument) for argument in call.args)
    kwargs = tuple((key, convert(value)) for key, value in keyword_items(call.kwargs))
    target = f"{call.target.namespace}.{call.target._opname}.{call.target._overloadname}"
    where = module_of(call.node), source_of(call.node)
    return Op(call.results[0], target, tuple(names), call.results, args, kwargs, *where)


def _tensor(name: str, program: Program) -> Tensor:
    meta = program.meta[name]
    return Tensor(name, tuple(meta.shape), str(meta.dtype).removeprefix("torch."))


def _read(op: Op, now: dict[str, str]) -> Op:
    if now.keys().isdisjoint(op.operands):
        return op
    return replace(op, operands=tuple(now.get(name, name) for name in op.operands))


def _share(prelude: list[Op]) -> tuple[list[Op], dict[str, str]]:
    """Each layer makes the same masks and tables: one copy is enough. Also which name became which."""
    now: dict[str, str] = {}
    made: dict[Any, Op] = {}
    for op in prelude:
        op = _read(op, now)
        if op.target == "aten.detach.default":
            now[op.results[0]] = op.operands[0]
            continue
        first = made.setdefault((op.target, op.operands, repr(op.args), repr(op.kwargs)), op)
        if first is not op:
            now.update(zip(op.results, first.results, strict=True))
    return list(made.values()), now


def _drop_detach(ops: list[Op], now: dict[str, str], tensors: dict[str, Tensor]) -> tuple[list[Op], dict[str, str]]:
    """A detach of what has no gradient anyway changes nothing."""
    kept: list[Op] = []
    for op in ops:
        op = _read(op, now)
        if op.target == "aten.detach.default" and not tensors[op.operands[0]].differentiable:
            now[op.results[0]] = op.operands[0]
        else:
            kept.append(op)
    return kept, now


def _constant_leaves(ops: list[Op], outputs: tuple[str, ...], fixed: set[str]) -> tuple[Leaf, ...]:
    read = dict.fromkeys(name for op in ops for name in op.operands if name in fixed)
    read.update(dict.fromkeys(name for name in outputs if name in fixed))
    return tuple(Leaf(name, "constant") for name in read)
