"""The way back from bodies: a graph in which every operator is written out."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from tapas.ir.graph import BLOCK, Graph, Op, body_of, own_tensors
from tapas.ir.patterns import inside
from tapas.ir.tensors import Tensor, Tensors


def inline_calls(graph: Graph, ops: Iterable[Op]) -> tuple[tuple[Op, ...], dict[str, Tensor]]:
    """Operators with the bodies in place of their calls, and the inner tensors: they have the names of the body, with a
    number from its second call on."""
    found: list[Op] = []
    inner: dict[str, Tensor] = {}
    calls: Counter[int] = Counter()
    for call in ops:
        if call.target != BLOCK:
            found.append(call)
            continue
        number = call.args[0]
        suffix = f"@call{calls[number]}" if calls[number] else ""
        calls[number] += 1
        found += _inlined(graph, call, suffix)
        inner.update(_inner_tensors(graph, call, suffix))
    return tuple(found), inner


def unfold(graph: Graph) -> Graph:
    """The same graph without bodies."""
    return inline_bodies(graph, set(range(len(graph.bodies)))) if graph.bodies else graph


def inline_single_calls(graph: Graph) -> Graph:
    """The same graph without bodies that are called only once: folding looks for smaller repeats there."""
    calls = Counter(call.args[0] for call in graph.ops if call.target == BLOCK)
    single = {number for number in range(len(graph.bodies)) if calls[number] < 2}
    return inline_bodies(graph, single) if single else graph


def inline_bodies(graph: Graph, numbers: Collection[int]) -> Graph:
    """The same graph without some of its bodies."""
    written = inline_where(graph, lambda _, call: call.args[0] in numbers)
    kept = [number for number in range(len(graph.bodies)) if number not in numbers]
    arguments: dict[int, tuple[Any, ...]] = {}  # calls of a body share theirs

    def renumbered(op: Op) -> Op:
        if op.target != BLOCK:
            return op
        args = arguments.setdefault(id(op.args), (kept.index(op.args[0]), *op.args[1:]))
        return op if args == op.args else replace(op, args=args)

    return replace(written, ops=tuple(map(renumbered, written.ops)), bodies=tuple(graph.bodies[n] for n in kept))


def inline_where(graph: Graph, wanted: Callable[[int, Op], bool]) -> Graph:
    """The same graph with some calls of bodies written out, by their places among the operators."""
    ops: list[Op] = []
    inner: dict[str, Tensor] = {}  # of the bodies, once for each call
    for number, call in enumerate(graph.ops):
        if call.target != BLOCK or not wanted(number, call):
            ops.append(call)
            continue
        suffix = f"@{number}"
        ops += _inlined(graph, call, suffix)
        inner.update(_inner_tensors(graph, call, suffix))
    return replace(graph, ops=tuple(ops), tensors=Tensors(graph.tensors.explicit | inner, graph.tensors.families))


def _inner_tensors(graph: Graph, call: Op, suffix: str) -> dict[str, Tensor]:
    body = body_of(graph, call)
    outside = {*body.inputs, *body.outputs}
    inner = ((name + suffix, tensor) for name, tensor in body.tensors.items() if name not in outside)
    return {name: tensor._replace(name=name) for name, tensor in inner}


def _inlined(graph: Graph, call: Op, suffix: str) -> tuple[Op, ...]:
    body = body_of(graph, call)
    names = dict(zip((*body.inputs, *body.outputs), (*own_tensors(call), *call.operands, *call.results), strict=True))
    return tuple(
        replace(
            op,
            name=op.name + suffix,
            operands=tuple(names.get(name) or name + suffix for name in op.operands),
            results=tuple(names.get(name) or name + suffix for name in op.results),
            module=inside(op.module, body.path, call.module),
        )
        for op in body.ops
    )
