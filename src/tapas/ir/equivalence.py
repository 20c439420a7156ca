"""Whether two graphs compute the same: the oracle of folding, which checks it against tracing every layer."""

from collections import Counter
from collections.abc import Hashable

from tapas.ir.graph import Graph, Op
from tapas.ir.inline import unfold

RESHAPE = "aten.reshape.default"

Key = tuple[Hashable, ...]


def differences(one: Graph, two: Graph) -> list[str]:
    """How two graphs differ apart from names and the order of independent operators; none if they do not."""
    numbers: dict[Key, int] = {}
    first, second = _Structure(one, numbers), _Structure(two, numbers)
    texts: list[str] = []
    for what in ("leaves", "outputs", "loss"):
        if getattr(first, what) != getattr(second, what):
            texts.append(f"{what} differ")
    for number in first.ops | second.ops:
        more = first.ops[number] - second.ops[number]
        if more:
            name, times = (first if more > 0 else second).example[number], abs(more)
            texts.append(f"{name} is there {times} times more in the {'first' if more > 0 else 'second'}")
    return texts


class _Structure:
    """A graph with numbers for names: the number of a tensor tells how it is made, from the leaves on. A tensor that
    is reshaped and then reshaped back is what it was: a body may return it in another shape than its callers use."""

    def __init__(self, graph: Graph, numbers: dict[Key, int]) -> None:
        graph = unfold(graph)
        made = {name for op in graph.prelude for name in op.results}
        number_of: dict[str, int] = {}
        bases: dict[str, str] = {}  # what a reshaped tensor was before

        def number(*key: Hashable) -> int:
            return numbers.setdefault(key, len(numbers))

        def fact(name: str) -> Key:
            tensor = graph.tensors[name]
            return tensor.shape, tensor.dtype, tensor.differentiable, tensor.unpriced

        self.leaves: Counter[Key] = Counter()
        for leaf in graph.given_leaves:
            name = leaf.paths if leaf.kind != "constant" else ()  # constants have names of their own
            number_of[leaf.tensor] = number(leaf.kind, name, *fact(leaf.tensor))
            if leaf.kind != "constant":
                self.leaves[leaf.kind, name, fact(leaf.tensor)] += 1
        makers: dict[int, tuple[Op, int, tuple[int, ...]]] = {}  # by number of the result: key and operands too
        counts: Counter[int] = Counter()
        for op in (*graph.prelude, *graph.ops):
            names = op.operands
            if op.target == RESHAPE:
                base = bases[op.results[0]] = bases.get(names[0], names[0])
                if fact(base) == fact(op.results[0]):
                    number_of[op.results[0]] = number_of[base]
                    continue
                names = (base,)
            operands = tuple(number_of[name] for name in names)
            attributes = repr((op.args, op.kwargs))  # by value: 1 is not True, and 0.0 is not -0.0
            key = number(op.target, op.own_precision, attributes, operands, *map(fact, op.results))
            counts[key] += op.results[0] not in made
            for r, name in enumerate(op.results):
                number_of[name] = number("result", key, r)
                makers[number_of[name]] = op, key, operands
        self.outputs = tuple(number_of[name] for name in graph.outputs)
        self.loss = number_of[graph.loss] if graph.loss else None
        self.ops: Counter[int] = Counter()
        self.example: dict[int, str] = {}
        waiting = list(self.outputs)
        while waiting:  # all that is left of the graph
            op, key, operands = makers.pop(waiting.pop(), (None, 0, ()))
            if op is not None:
                waiting += operands
                self.ops[key] = counts[key]
                self.example[key] = f"{op.target} in {op.module}"
