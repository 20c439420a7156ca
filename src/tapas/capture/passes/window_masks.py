"""Attention with a mask that is a window of positions: an operator that knows how far it looks, and has no mask."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tapas.ir.bands import Band, bands
from tapas.ir.graph import BLOCK, Body, Graph, Leaves, Op, Ref, Tensor, Tensors, body_of
from tapas.ir.inline import inline_bodies

ATTENTION, WINDOW = "aten.scaled_dot_product_attention.default", "tapas.window_attention.default"
FOUR = tuple(map(Ref, range(4)))


def with_windows(graph: Graph) -> Graph:
    """The graph in which all such masks are gone that nobody else reads."""
    known = {name: band for name, band in bands(graph.prelude).items() if name in graph.leaf_of}
    if not known:
        return graph
    given = [_given(graph, number, known) for number in range(len(graph.bodies))]
    if mixed := {n for n, inputs in enumerate(given) if any(len(s) > 1 and s != {None} for s in inputs.values())}:
        return with_windows(inline_bodies(graph, mixed))  # written once, but not for one and the same window
    ops, bodies, dropped = list[Op](), list[Body](), dict[int, list[int]]()
    for number, body in enumerate(graph.bodies):
        same = {name: band for name, (band, *_) in given[number].items() if band is not None}
        made = _rewritten(body.ops, same, body.tensors)
        read = {name for op in made for name in op.operands} | {*body.outputs}
        unread = {name for op in body.ops for name in op.operands} - read
        own = len(body.inputs) - _operands(graph, number)
        dropped[number] = [i - own for i, name in enumerate(body.inputs) if name in unread and i >= own]
        inputs = tuple(name for name in body.inputs if name not in unread)
        tensors = {name: tensor for name, tensor in body.tensors.items() if name not in unread}
        bodies.append(replace(body, ops=made, inputs=inputs, tensors=tensors) if unread else body)
    shared: dict[int, Any] = {}  # calls of a body share their arguments
    for op in _rewritten(graph.ops, known, graph.tensors):
        gone = dropped.get(op.args[0], []) if op.target == BLOCK else []
        if gone:
            operands = tuple(name for i, name in enumerate(op.operands) if i not in gone)
            args = shared.setdefault(id(op.args), (op.args[0], tuple(map(Ref, range(len(operands)))), op.args[2]))
            op = replace(op, operands=operands, args=args)
        ops.append(op)
    return _without(replace(graph, ops=tuple(ops), bodies=tuple(bodies)), known)


def _operands(graph: Graph, number: int) -> int:
    """Of the calls of a body."""
    return next(len(op.operands) for op in graph.ops if op.target == BLOCK and op.args[0] == number)


def _given(graph: Graph, number: int, known: Mapping[str, Band]) -> dict[str, set[Band | None]]:
    """What the calls of a body give to its inputs."""
    found: defaultdict[str, set[Band | None]] = defaultdict(set)
    for op in graph.ops:
        if op.target == BLOCK and op.args[0] == number:
            inputs = body_of(graph, op).inputs
            for name, given in zip(inputs[len(inputs) - len(op.operands) :], op.operands, strict=True):
                found[name].add(known.get(given))
    return found


def _rewritten(ops: Iterable[Op], known: Mapping[str, Band], tensors: Mapping[str, Tensor]) -> tuple[Op, ...]:
    return tuple(_windowed(op, known[op.operands[3]]) if _fits(op, known, tensors) else op for op in ops)


def _fits(op: Op, known: Mapping[str, Band], tensors: Mapping[str, Tensor]) -> bool:
    if op.target != ATTENTION or op.args[:4] != FOUR or len(op.operands) != 4 or op.operands[3] not in known:
        return False
    q, k, v, mask = (tensors[name].shape for name in op.operands)
    rest = any(op.args[4:]) or any(value for key, value in op.kwargs if key != "scale")
    alike = q[:-1] == k[:-1] == v[:-1] and mask[-1] == q[-2]
    return alike and not rest and known[op.operands[3]].before < q[-2] - 1


def _windowed(op: Op, band: Band) -> Op:
    kwargs = tuple((key, value) for key, value in op.kwargs if key == "scale")
    return replace(op, target=WINDOW, operands=op.operands[:3], args=(*FOUR[:3], *band), kwargs=kwargs)


def _without(graph: Graph, known: Mapping[str, Band]) -> Graph:
    """Masks that are read no more, and what the prelude computed for them alone, are gone."""
    read = {name for op in graph.ops for name in op.operands} | {*graph.outputs}
    unread = known.keys() - read
    made = {name for op in graph.prelude for name in op.results}
    wanted = {name for name in graph.leaf_of if name in made} - unread
    kept: list[Op] = []
    for op in reversed(graph.prelude):
        if not wanted.isdisjoint(op.results):
            kept.append(op)
            wanted.update(op.operands)
    gone = made - {name for op in kept for name in op.results}
    leaves = {name: leaf for name, leaf in graph.leaf_of.explicit.items() if name not in gone | unread}
    tensors = {name: tensor for name, tensor in graph.tensors.explicit.items() if name not in gone}
    return replace(
        graph, prelude=tuple(reversed(kept)), tensors=Tensors(tensors, graph.tensors.families),
        leaf_of=Leaves(leaves, graph.leaf_of.families, graph.leaf_of.order),
    )  # fmt: skip
