"""The graph that every stage after capture works on: tensors, operators, leaves.

Forward operators only, in program order. Gradients are not operators here: the layout states
account for them (see sharding/layout.py). Names are unique; an operator names its tensors, the graph
holds their shapes.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

from tapas.errors import GraphError
from tapas.ir.tensors import ITEMSIZE, Leaf, Leaves, NamesBelow, Tensor, Tensors

__all__ = [
    "BLOCK", "ITEMSIZE", "Body", "Graph", "Leaf", "Leaves", "Leaving", "Op", "Ref", "Tensor", "Tensors", "as_read",
    "body_of", "op_text", "own_tensors", "refs", "verify",
]  # fmt: skip

BLOCK = "tapas.block"  # the call of a body


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in an operator's arguments for its operand number `index`."""

    index: int

    def __str__(self) -> str:
        return f"%{self.index}"


@dataclass(frozen=True, slots=True)
class Op:
    name: str
    target: str  # e.g. "aten.linear.default"
    operands: tuple[str, ...]  # tensor names, in order of appearance in args and kwargs
    results: tuple[str, ...]  # tensor names
    args: tuple[Any, ...]  # constants and Refs, nested in tuples; dtypes as strings "torch.float32"
    kwargs: tuple[tuple[str, Any], ...] = ()
    module: str = ""  # path of the module it was called in, e.g. "model.layers.0.mlp"
    source: str = ""  # "file.py:12 in forward"
    own_precision: bool = False  # casts are written down: an autocast around the model has no say in it


class Leaving(NamedTuple):
    """What is wanted of a tensor that leaves the graph."""

    whole: bool  # by every device: scalars, what a loss is made of outside, and what is written to a buffer
    gradient: bool  # one may come back through it
    priced: bool  # and is part of the step that is planned


def as_read(op: "Op", tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The operands as an operator sees them: it sends no gradient back where none comes to its results."""
    operands, results = [tensors[name] for name in op.operands], [tensors[name] for name in op.results]
    if not any(t.differentiable for t in results):
        return tuple(t.constant for t in operands)
    if not any(t.priced for t in results):
        return tuple(t._replace(unpriced=t.differentiable) for t in operands)
    return tuple(operands)


@dataclass(frozen=True)
class Body:
    """Operators that are written once and called many times, as `tapas.block`. The arguments of a call are the number
    of the body, the operands, and the names of what the called submodule itself holds: that and then the operands
    stand for the inputs, the results for the outputs."""

    path: str  # the submodule it was captured from
    ops: tuple[Op, ...]
    tensors: dict[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """`prelude` holds the operators that depend on constants and buffers only (masks, rotary
    tables): they run as they are on every rank, and what the rest reads of them are leaves of kind
    "constant" under the same tensor names."""

    tensors: Tensors
    leaf_of: Leaves  # by tensor
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    loss: str | None = None  # the output whose gradient is taken
    prelude: tuple[Op, ...] = ()
    name: str = ""
    trimmed: int = 0  # auxiliary operators that capture left out
    bodies: tuple[Body, ...] = ()
    notes: tuple[str, ...] = ()  # what a user should know: repeated submodules that had to be traced one by one
    losses: frozenset[str] = frozenset()  # outputs whose gradients are part of the step that is planned
    writes: tuple[tuple[str, str], ...] = ()  # buffers, and what they are afterwards: the last of the outputs
    found: Mapping[str, str] | None = None  # factors of operators without a rule, see rules/found.py; None: not tried

    @property
    def leaves(self) -> Iterable[Leaf]:
        return self.leaf_of.values()

    @property
    def given_leaves(self) -> list[Leaf]:
        """Leaves whose values the prelude does not make."""
        made = {name for op in self.prelude for name in op.results}
        return [leaf for leaf in self.leaves if leaf.tensor not in made]

    @property
    def returned(self) -> tuple[str, ...]:
        """The outputs that the model returns."""
        return self.outputs[: len(self.outputs) - len(self.writes)]

    @cached_property
    def leaving(self) -> dict[str, Leaving]:
        """By name of the output."""
        returned, written = set(self.returned), {value for _, value in self.writes}
        return {
            name: Leaving(
                name in written or name in self.losses or not self.tensors[name].shape,
                name in returned and self.tensors[name].differentiable,
                name in self.losses,
            )
            for name in self.outputs
        }

    @property
    def loss_position(self) -> int | None:
        """Of the outputs."""
        return self.outputs.index(self.loss) if self.loss is not None else None

    @property
    def training(self) -> bool:
        return any(self.tensors[leaf.tensor].differentiable for leaf, _ in self.leaf_of.distinct)

    @cached_property
    def producers(self) -> dict[str, Op]:
        return {name: op for op in self.ops for name in op.results}

    @cached_property
    def readers(self) -> dict[str, tuple[Op, ...]]:
        readers: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in dict.fromkeys((*own_tensors(op), *op.operands)):
                readers.setdefault(name, []).append(op)
        return {name: tuple(ops) for name, ops in readers.items()}

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """A number for what each operator is apart from its wiring: equal for equal operators, arguments,
        shapes and dtypes. Folding compares these numbers instead of operators."""
        numbers: dict[tuple[Hashable, ...], int] = {}
        kinds: list[int] = []

        def fact(name: str) -> Hashable:
            return self.tensors[name][1:]

        for op in self.ops:
            if op.target == BLOCK:  # the body tells the rest
                kinds.append(numbers.setdefault((op.target, op.args[0]), len(numbers)))
                continue
            attributes = repr((op.args, op.kwargs))  # by value: 1 is not True, and 0.0 is not -0.0
            key = (op.target, op.own_precision, attributes, *map(fact, op.operands), *map(fact, op.results))
            kinds.append(numbers.setdefault(key, len(numbers)))
        return tuple(kinds)

    @cached_property
    def produced_at(self) -> dict[str, int]:
        """The number of the operator that makes a tensor."""
        return {name: i for i, op in enumerate(self.ops) for name in op.results}

    @cached_property
    def shared(self) -> dict[str, tuple[int, int]]:
        """Tensors that several operators read: the numbers of the first and of the last of them."""
        once: set[str] = set()
        again: set[str] = set()
        for op in self.ops:
            if not once.isdisjoint(op.operands):
                again.update(once.intersection(op.operands))
            once.update(op.operands)
        spans: dict[str, tuple[int, int]] = {}
        for i, op in enumerate(self.ops):
            if not again.isdisjoint(op.operands):
                for name in again.intersection(op.operands):
                    spans[name] = spans.get(name, (i, i))[0], i
        return spans

    def parameters(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.kind == "parameter")

    def trained(self) -> tuple[Leaf, ...]:
        """Parameters that get a gradient."""
        return tuple(leaf for leaf in self.parameters() if self.tensors[leaf.tensor].differentiable)

    def __str__(self) -> str:
        lines = [f"graph {self.name} ({len(self.ops)} operators)"]
        for leaf in self.leaves:
            paths = "" if leaf.paths in ((leaf.tensor,), ()) else f"  # {', '.join(leaf.paths)}"
            lines.append(f"  {leaf.kind} {self.tensors[leaf.tensor]}{paths}")
        lines += ["  prelude " + op_text(self, op) for op in self.prelude]
        for number, body in enumerate(self.bodies):
            lines.append(
                f"  body {number} of {body.path}({', '.join(str(body.tensors[name]) for name in body.inputs)})"
            )
            lines += ["    " + op_text(body, op) for op in body.ops]
            lines.append("    return " + ", ".join(body.outputs))
        lines += ["  " + op_text(self, op) for op in self.ops]
        lines.append("  return " + ", ".join(self.outputs) + (f"  # loss: {self.loss}" if self.loss else ""))
        return "\n".join(lines)


def own_tensors(call: Op) -> Sequence[str]:
    """What the submodule that is called holds of the inputs of a body, by the names of its tensors."""
    return NamesBelow(call.module, call.args[2]) if call.target == BLOCK and call.args[2] else ()


def body_of(graph: Graph, call: Op) -> Body:
    number: int = call.args[0]
    return graph.bodies[number]


def op_text(graph: Graph | Body, op: Op) -> str:
    results = ", ".join(str(graph.tensors[name]) for name in op.results)
    arguments = [_argument_text(a, op) for a in op.args]
    arguments += [f"{key}={_argument_text(value, op)}" for key, value in op.kwargs]
    return f"{results} = {op.target}({', '.join(arguments)})" + (f"  # {op.module}" if op.module else "")


def _argument_text(value: Any, op: Op) -> str:
    if isinstance(value, Ref):
        return op.operands[value.index]
    if isinstance(value, tuple):
        return "(" + ", ".join(_argument_text(v, op) for v in cast(tuple[Any, ...], value)) + ")"
    return str(value)


def refs(value: Any) -> list[int]:
    """The operand numbers that occur in an argument tree, in order."""
    if isinstance(value, Ref):
        return [value.index]
    if isinstance(value, tuple):
        return [index for item in cast(tuple[Any, ...], value) for index in refs(item)]
    return []


def verify(graph: Graph) -> Graph:
    """Return the graph, or raise: every name defined once and before its use, every Ref valid."""

    def wrong(place: str, fact: str) -> GraphError:
        return GraphError(place, fact, "this is a defect of the stage that made the graph; please report it")

    known: set[str] = set()

    def define(place: str, name: str) -> None:
        if name in known:
            raise wrong(place, f"tensor {name} is defined twice")
        if name not in graph.tensors:
            raise wrong(place, f"tensor {name} has no shape")
        if graph.tensors[name].dtype not in ITEMSIZE:
            raise GraphError(place, f"has dtype {graph.tensors[name].dtype}", "use one of " + ", ".join(ITEMSIZE))
        known.add(name)

    names: set[str] = set()
    fits: dict[int, int] = {}
    held: set[tuple[int, int]] = set()  # families and arguments of calls that go together
    for leaf, _ in graph.leaf_of.distinct:
        if leaf.kind not in ("input", "parameter", "buffer", "constant"):
            raise wrong(leaf.tensor, f"unknown kind of leaf {leaf.kind}")
        define(leaf.tensor, leaf.tensor)
    for op in graph.ops:
        if op.name in names:
            raise wrong(op.name, "two operators have this name")
        names.add(op.name)
        if op.kwargs or fits.get(id(op.args)) != len(op.operands):  # calls of a body share their arguments
            used = refs(op.args) + [i for _, value in op.kwargs for i in refs(value)]
            if sorted(set(used)) != list(range(len(op.operands))):
                raise wrong(op.name, f"arguments refer to operands {used}, there are {len(op.operands)}")
            if op.target == BLOCK and len(op.args[2]) + len(op.operands) != len(body_of(graph, op).inputs):
                raise wrong(op.name, "does not give its body what that reads")
            if not op.kwargs:
                fits[id(op.args)] = len(op.operands)
        if not known.issuperset(op.operands):
            for name in op.operands:
                if name not in known and name not in graph.leaf_of:
                    raise wrong(op.name, f"reads {name} before it is made")
        if op.target == BLOCK and op.args[2]:
            family = graph.leaf_of.families.get(op.module)
            if family is None or ((id(family), id(op.args)) not in held and not family.held.keys() >= set(op.args[2])):
                raise wrong(op.name, f"{op.module} does not hold what its body reads")
            held.add((id(family), id(op.args)))
        elif any(name in graph.leaf_of for name in op.results):
            raise wrong(op.name, "makes what is a leaf")
        if not op.results:
            raise wrong(op.name, "has no result")
        for name in op.results:
            define(op.name, name)
    for name in graph.outputs:
        if name not in known and name not in graph.leaf_of:
            raise wrong("outputs", f"{name} is never made")
    # what folding asks of every operator is worked out once, with the graph
    _ = graph.kinds, graph.produced_at, graph.shared
    return graph
