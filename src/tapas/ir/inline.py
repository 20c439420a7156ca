"""The way back from bodies: a graph in which every operator is written out."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from tapas.ir.graph import BLOCK, Body, Graph, Op, held_by
from tapas.ir.patterns import inside
from tapas.ir.tensors import Tensor, Tensors

RESHAPE = "aten.reshape.default"


def with_bodies(graph: Graph, ops: Iterable[Op]) -> tuple[Op, ...]:
    """Operators with the bodies in place of their calls; inner tensors have the names of the body."""
    return tuple(op for call in ops for op in (_written(graph, call, "") if call.target == BLOCK else (call,)))


def unfold(graph: Graph) -> Graph:
    """The same graph without bodies."""
    return _without(graph, set(range(len(graph.bodies)))) if graph.bodies else graph


def without_single(graph: Graph) -> Graph:
    """The same graph without bodies that are called only once: folding looks for smaller repeats there."""
    calls = Counter(call.args[0] for call in graph.ops if call.target == BLOCK)
    single = {number for number in range(len(graph.bodies)) if calls[number] < 2}
    return _without(graph, single) if single else graph


def _without(graph: Graph, numbers: set[int]) -> Graph:
    ops: list[Op] = []
    more: dict[str, Tensor] = {}
    kept = [number for number in range(len(graph.bodies)) if number not in numbers]
    arguments: dict[int, tuple] = {}  # calls of a body share theirs
    for number, call in enumerate(graph.ops):
        if call.target != BLOCK:
            ops.append(call)
            continue
        if call.args[0] not in numbers:
            args = arguments.setdefault(id(call.args), (kept.index(call.args[0]), *call.args[1:]))
            ops.append(call if args == call.args else replace(call, args=args))
            continue
        body = graph.bodies[call.args[0]]
        suffix = f"@{number}"
        ops += _written(graph, call, suffix)
        outside = {*body.inputs, *body.outputs}
        more.update(
            (name + suffix, tensor._replace(name=name + suffix))
            for name, tensor in body.tensors.items()
            if name not in outside
        )
    tensors = Tensors(graph.tensors.known | more, graph.tensors.homes)
    return replace(graph, ops=tuple(ops), tensors=tensors, bodies=tuple(graph.bodies[number] for number in kept))


def _written(graph: Graph, call: Op, suffix: str) -> tuple[Op, ...]:
    body: Body = graph.bodies[call.args[0]]
    names = dict(zip((*body.inputs, *body.outputs), (*held_by(call), *call.operands, *call.results), strict=True))
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


def differences(one: Graph, two: Graph) -> list[str]:
    """How two graphs differ apart from names and the order of independent operators; none if they do not."""
    numbers: dict[tuple, int] = {}
    first, second = _Shape(one, numbers), _Shape(two, numbers)
    found = []
    for what in ("leaves", "outputs", "loss"):
        if getattr(first, what) != getattr(second, what):
            found.append(f"{what} differ")
    for number in first.ops | second.ops:
        more = first.ops[number] - second.ops[number]
        if more:
            name, times = (first if more > 0 else second).example[number], abs(more)
            found.append(f"{name} is there {times} times more in the {'first' if more > 0 else 'second'}")
    return found


class _Shape:
    """A graph with numbers for names: the number of a tensor tells how it is made, from the leaves on. A tensor that
    is reshaped and then reshaped back is what it was: a body may return it in another shape than its callers use."""

    def __init__(self, graph: Graph, numbers: dict[tuple, int]) -> None:
        graph = unfold(graph)
        made = {name for op in graph.prelude for name in op.results}
        known: dict[str, int] = {}
        bases: dict[str, str] = {}  # what a reshaped tensor was before

        def number(*key: object) -> int:
            return numbers.setdefault(key, len(numbers))

        def fact(name: str) -> tuple:
            tensor = graph.tensors[name]
            return tensor.shape, tensor.dtype, tensor.differentiable

        self.leaves: Counter[tuple] = Counter()
        for leaf in graph.leaves:
            if leaf.tensor not in made:
                name = leaf.paths if leaf.kind != "constant" else ()  # constants have names of their own
                known[leaf.tensor] = number(leaf.kind, name, *fact(leaf.tensor))
                if leaf.kind != "constant":
                    self.leaves[leaf.kind, name, fact(leaf.tensor)] += 1
        makers: dict[int, tuple[Op, int, tuple[int, ...]]] = {}  # by number of the result: key and operands too
        counts: Counter[int] = Counter()
        for op in (*graph.prelude, *graph.ops):
            names = op.operands
            if op.target == RESHAPE:
                base = bases[op.results[0]] = bases.get(names[0], names[0])
                if fact(base) == fact(op.results[0]):
                    known[op.results[0]] = known[base]
                    continue
                names = (base,)
            operands = tuple(known[name] for name in names)
            attributes = repr((op.args, op.kwargs))  # by value: 1 is not True, and 0.0 is not -0.0
            key = number(op.target, attributes, operands, *map(fact, op.results))
            counts[key] += op.results[0] not in made
            for r, name in enumerate(op.results):
                known[name] = number("result", key, r)
                makers[known[name]] = op, key, operands
        self.outputs = tuple(known[name] for name in graph.outputs)
        self.loss = known[graph.loss] if graph.loss else None
        self.ops: Counter[int] = Counter()
        self.example: dict[int, str] = {}
        waiting = list(self.outputs)
        while waiting:  # all that is left of the graph
            op, key, operands = makers.pop(waiting.pop(), (None, 0, ()))
            if op is not None:
                waiting += operands
                self.ops[key] = counts[key]
                self.example[key] = f"{op.target} in {op.module}"
