"""From functional calls to the Graph: dead calls out, constants into the prelude, names and flags set."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Protocol

import torch

from tapas.capture.calls import OWN_PRECISION, ExportedCall, FlatProgram, Value, operands
from tapas.capture.diagnostics import module_of, source_of
from tapas.capture.passes.canonicalize import keyword_items, plain
from tapas.ir.graph import Graph, Leaf, Leaves, Op, Ref, Tensor, Tensors

# Floating-point results that do not depend on their operands' values, or are cut off on purpose.
_CUT = frozenset((
    "detach", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "bernoulli", "one_hot", "histc", "floor_divide", "sign", "heaviside", "bincount",
))  # fmt: skip
_STATISTICS = ("tapas.batch_norm.default", "tapas.instance_norm.default")  # all results but the first are such

_FLOATING = ("float", "bfloat", "complex")


@dataclass(frozen=True)
class GraphBoundary:
    """What build needs besides the calls."""

    leaves: tuple[Leaf, ...]
    outputs: tuple[str, ...]
    wanted: frozenset[str]  # outputs whose gradient may be taken
    trainable: frozenset[str]  # leaves that want a gradient
    mutated: frozenset[str]  # leaves that are written to
    name: str
    loss: str | None = None
    trained: frozenset[str] = frozenset()  # leaves that a gradient flows to elsewhere: to detach them means something
    losses: frozenset[str] | None = None  # those of the wanted ones that are planned for; None: all of them
    writes: tuple[tuple[str, str], ...] = ()  # buffers, and what they are afterwards
    complete: bool = False  # a model, not a part of one: whatever it returns has to be made by it

    @property
    def leaving(self) -> tuple[str, ...]:
        """All that has to be made."""
        return (*self.outputs, *(value for _, value in self.writes))

    @property
    def given(self) -> tuple[str, ...]:
        """Parameters and inputs."""
        return tuple(leaf.tensor for leaf in self.leaves if leaf.kind in ("parameter", "input"))

    @cached_property
    def held(self) -> set[str]:
        """Tensors that are the same whatever the inputs are."""
        return {leaf.tensor for leaf in self.leaves if leaf.kind in ("buffer", "constant")} - self.mutated


def build(calls: list[ExportedCall], program: FlatProgram, boundary: GraphBoundary) -> Graph:
    calls = alive(calls, set(boundary.leaving))
    fixed = constants(calls, boundary)
    rest = [call for call in calls if call.results[0] not in fixed]
    prelude = [op_of(call) for call in calls if call.results[0] in fixed]
    ops = [op_of(call) for call in rest]
    tensors = tensors_of(calls, program, boundary.leaves)
    if boundary.wanted:
        no_grad = {call.results[0] for call in rest if not call.grad}
        depends = reached(ops, dtypes_of(tensors), boundary.trainable, no_grad)
        flows = needed(ops, depends, boundary.wanted)
        mark(tensors, flows)
        if boundary.losses is not None:
            unprice(tensors, flows - needed(ops, depends, boundary.losses))
    return finish(ops, prelude, tensors, boundary, program.total)


def finish(ops: list[Op], prelude: list[Op], tensors: dict[str, Tensor], boundary: GraphBoundary, total: int) -> Graph:
    """What is there several times or for nothing goes; the graph of the rest."""
    fixed = {name for op in prelude for name in op.results}
    prelude, now = _share(prelude)
    ops, now = _drop_detach(ops, now, tensors, boundary.trained)
    outputs = tuple(now.get(name, name) for name in boundary.leaving)
    leaves = {leaf.tensor: leaf for leaf in (*boundary.leaves, *_constant_leaves(ops, outputs, fixed))}
    for name in now:
        tensors.pop(name, None)
    trimmed = max(total - len(ops) - len(prelude), 0)
    if boundary.complete:
        outputs = _made(ops, outputs, tensors, boundary.losses or ())
    named = dict(zip(boundary.outputs, outputs, strict=False))
    written = outputs[len(boundary.outputs) :]
    return Graph(
        Tensors(tensors), Leaves(leaves), tuple(ops), outputs, named.get(boundary.loss or ""), tuple(prelude),
        boundary.name, trimmed, losses=frozenset(named[name] for name in boundary.losses or ()),
        writes=tuple((buffer, value) for (buffer, _), value in zip(boundary.writes, written, strict=True)),
    )  # fmt: skip


def floating(dtype: str) -> bool:
    return dtype.startswith(_FLOATING)


class BlockFlow(Protocol):
    """A call of many operators, which tells itself what flows through it."""

    def ahead(self, depends: set[str]) -> Iterable[str]:
        """The results that depend on sources, if these tensors do."""
        ...

    def back(self, wanted: set[str]) -> Iterable[str]:
        """The operands that a gradient flows to, if it comes from these tensors."""
        ...


def reached(
    ops: Iterable[Op | BlockFlow], dtypes: Mapping[str, str], sources: Iterable[str], no_grad: set[str]
) -> set[str]:
    """Tensors that depend on `sources` through differentiable operators.

    `no_grad` holds the names of the operators that ran under torch.no_grad().
    """
    found = set(sources)
    for op in ops:
        if not isinstance(op, Op):
            found.update(op.ahead(found))
        elif op.name not in no_grad and op.target.split(".")[1] not in _CUT and not found.isdisjoint(op.operands):
            results = op.results[:1] if op.target in _STATISTICS else op.results
            found.update(name for name in results if floating(dtypes[name]))
    return found


def needed(ops: Sequence[Op | BlockFlow], depends: set[str], wanted: Iterable[str]) -> set[str]:
    """Those of the tensors that depend on sources on which `wanted` ones depend."""
    found = {name for name in wanted if name in depends}
    for op in reversed(ops):
        if not isinstance(op, Op):
            found.update(op.back(found))
        elif not found.isdisjoint(op.results):
            found.update(name for name in op.operands if name in depends)
    return found


def alive(
    calls: list[ExportedCall], wanted: set[str], reads: Callable[[ExportedCall, set[str]], Iterable[str]] | None = None
) -> list[ExportedCall]:
    """Calls that the wanted tensors depend on, to which all is added that these calls read; `reads` tells what a call
    needs for those of its results that are wanted."""
    found = []
    for call in reversed(calls):
        if not wanted.isdisjoint(call.results):
            found.append(call)
            wanted.update(operands(call) if reads is None else reads(call, wanted))
    return found[::-1]


def constants(calls: list[ExportedCall], boundary: GraphBoundary, never: Any = None) -> set[str]:
    """Results that depend on constants and unwritten buffers only, random ones and those of `never` excepted."""
    fixed: set[str] = set()
    for call in calls:
        if call.target is never or torch.Tag.nondeterministic_seeded in call.target.tags:
            continue
        if all(name in boundary.held or name in fixed for name in operands(call)):
            fixed.update(call.results)
    return fixed


def tensors_of(calls: list[ExportedCall], program: FlatProgram, leaves: Iterable[Leaf]) -> dict[str, Tensor]:
    names = [*(leaf.tensor for leaf in leaves), *(name for call in calls for name in call.results)]
    return {name: tensor_of(name, program) for name in names}


def dtypes_of(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: tensor.dtype for name, tensor in tensors.items()}


def mark(tensors: dict[str, Tensor], names: Iterable[str]) -> None:
    for name in names:
        tensor = tensors[name]
        if not tensor.differentiable:
            tensors[name] = Tensor(name, tensor.shape, tensor.dtype, True)


def unprice(tensors: dict[str, Tensor], names: Iterable[str]) -> None:
    for name in names:
        tensors[name] = tensors[name]._replace(unpriced=True)


# What `generator=None` makes of operators, and what they are: only the latter have rules, and may lack the argument.
_UNSEEDED = {"generator": "default", "low_generator": "low"}


def op_of(call: ExportedCall) -> Op:
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
    overload = call.overload if "generator" in dict(kwargs) else _UNSEEDED.get(call.overload, call.overload)
    target = f"{call.target.namespace}.{call.opname}.{overload}"
    where = module_of(call.node), source_of(call.node)
    own_precision = call.node.meta.get(OWN_PRECISION, False)
    return Op(call.results[0], target, tuple(names), call.results, args, kwargs, *where, own_precision)


def tensor_of(name: str, program: FlatProgram, differentiable: bool = False) -> Tensor:
    meta = program.meta[name]
    return Tensor(name, tuple(meta.shape), dtype_name(meta.dtype), differentiable)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read(op: Op, now: dict[str, str]) -> Op:
    if not now or now.keys().isdisjoint(op.operands):
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
        first = made.setdefault((op.target, op.own_precision, op.operands, repr(op.args), repr(op.kwargs)), op)
        if first is not op:
            now.update(zip(op.results, first.results, strict=True))
    return list(made.values()), now


def _drop_detach(
    ops: list[Op], now: dict[str, str], tensors: dict[str, Tensor], trained: frozenset[str]
) -> tuple[list[Op], dict[str, str]]:
    """A detach of what has no gradient anyway changes nothing."""
    kept: list[Op] = []
    for op in ops:
        op = _read(op, now)
        detaches = op.target == "aten.detach.default"
        if detaches and not tensors[op.operands[0]].differentiable and op.operands[0] not in trained:
            now[op.results[0]] = op.operands[0]
        else:
            kept.append(op)
    return kept, now


def _made(
    ops: list[Op], outputs: tuple[str, ...], tensors: dict[str, Tensor], losses: Container[str]
) -> tuple[str, ...]:
    """The outputs; those that the model was given, or holds, are copied."""
    made = {name for op in ops for name in op.results}
    now: dict[str, str] = {}
    for name in dict.fromkeys(outputs):
        if name not in made:
            copied = now[name] = f"{name}.out"
            unpriced = tensors[name].unpriced or (tensors[name].differentiable and name not in losses)
            tensors[copied] = tensors[name]._replace(name=copied, unpriced=unpriced)
            ops.append(Op(copied, "aten.clone.default", (name,), (copied,), (Ref(0),)))
    return tuple(now.get(name, name) for name in outputs)


def _constant_leaves(ops: list[Op], outputs: tuple[str, ...], fixed: set[str]) -> tuple[Leaf, ...]:
    reading = (op.operands for op in ops if not fixed.isdisjoint(op.operands))
    read = dict.fromkeys(name for names in reading for name in names if name in fixed)
    read.update(dict.fromkeys(name for name in outputs if name in fixed))
    return tuple(Leaf(name, "constant") for name in read)
