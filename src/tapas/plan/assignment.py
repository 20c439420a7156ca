"""All that was decided, and nothing else: what a plan file stores, the runtime compiles and verification replays.

A decision is made for a block and the copies of it that do the same. It names the layout of every tensor, the choice
of every operator, and the routes between them: routes are part of it because the cheapest one depends on prices, and a
plan has to do the same whatever is thought of prices later.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tapas.ir.fold import Block, Folded
from tapas.ir.graph import Tensors, as_read
from tapas.plan.fingerprint import GraphStructure, tensor_references
from tapas.rules.base import Call, rule_for
from tapas.sharding.layout import Layout, R, as_values
from tapas.sharding.route import Hop, Route

LATER = {"later": True}  # a field that plan files of the same format may lack
OUTPUT = -1  # in place of the number of an operator: whoever calls the model


@dataclass(frozen=True, slots=True)
class OperatorDecision:
    choice: tuple[str, ...]  # per axis: the factor it splits (with its tiling), R, B (whole) or P0, P1, ... (partial)
    operands: tuple[Layout, ...]  # as it reads them
    results: tuple[Layout, ...]  # as it leaves them
    routes: tuple[Route, ...]  # of each operand, from where it is found


@dataclass(frozen=True, slots=True)
class TensorDecision:
    """A tensor with several readers, or one that leaves its block: all of them find it in one layout."""

    tensor: str  # `w0` or `3.0`, as in BlockStructure
    layout: Layout
    route: Route  # from how it is stored, or left by its operator


@dataclass(frozen=True, slots=True)
class OutputDecision:
    """A tensor that leaves the model."""

    export: int
    gradient: bool  # may come back through it; otherwise its route starts from the values of its states
    priced: bool  # and is part of the planned step
    layout: Layout
    route: Route  # from how its readers find it


@dataclass(frozen=True, slots=True)
class BlockDecision:
    recompute: str  # see rules/base.py
    weights: tuple[Layout, ...]  # how they are stored
    ports: tuple[Layout, ...]  # how copies before have left what this one reads
    operators: tuple[OperatorDecision, ...]
    tensors: tuple[TensorDecision, ...]
    outputs: tuple[OutputDecision, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    mesh: tuple[int, ...]
    structure: GraphStructure
    decisions: tuple[BlockDecision, ...]
    copies: tuple[int, ...]  # for each copy the number of its decision
    pieces: int = field(
        default=1, metadata=LATER
    )  # of activations that travel while products are computed, see pieces.py
    found: tuple[tuple[str, str], ...] = field(default=(), metadata=LATER)  # factors that were tried out

    def decision(self, copy: int) -> BlockDecision:
        return self.decisions[self.copies[copy]]


@dataclass(frozen=True, slots=True)
class Journey:
    """A tensor on a route."""

    tensor: str
    start: Layout
    route: Route
    back: bool  # in the planned step its gradient goes the same way back
    reader: int | None = None  # the operator at its end, or OUTPUT; None: where all readers find it


def journeys(block: Block, tensors: Tensors, decision: BlockDecision) -> Iterator[Journey]:
    """All routes that the copies of a block take, in the order of its operators."""
    names = {reference: name for name, reference in tensor_references(block).items()}
    published = {names[tensor.tensor]: tensor for tensor in decision.tensors}
    where: dict[str, Layout] = dict(zip(block.ports, decision.ports, strict=True))

    def publish(name: str, layout: Layout) -> Iterator[Journey]:
        where[name] = layout
        if name in published:
            yield Journey(name, layout, published[name].route, tensors[name].priced)
            where[name] = published[name].layout

    for name, layout in zip(block.weights, decision.weights, strict=True):
        yield from publish(name, layout)
    for number, (op, decided) in enumerate(zip(block.ops, decision.operators, strict=True)):
        for tensor, route in zip(as_read(op, tensors), decided.routes, strict=True):
            if route:
                start = where[tensor.name] if tensor.differentiable else as_values(where[tensor.name])
                yield Journey(tensor.name, start, route, tensor.priced, number)
        for name, layout in zip(op.results, decided.results, strict=True):
            yield from publish(name, layout)
    for output in decision.outputs:
        name = block.exports[output.export]
        start = where[name] if output.gradient else as_values(where[name])
        yield Journey(name, start, output.route, output.priced, OUTPUT)


def gathered_ahead(hop: Hop) -> bool:
    """Whether the first steps of a stored weight, if they are like this one, are done ahead of its block: they gather,
    or do nothing but sum its gradient."""
    sums = hop.old.value == hop.new.value and hop.backward == "all_reduce"
    return hop.forward == "all_gather" or sums


def saved_weights(block: Block, tensors: Tensors) -> set[str]:
    """Weights of a block that its operators keep for the backward pass."""
    weights = set(block.weights)
    found: set[str] = set()
    for op in block.ops:
        if not weights.isdisjoint(op.operands):
            call = Call.of(op, tensors)
            kept = rule_for(call).saved_operands(call)
            found |= {name for name, saved in zip(op.operands, kept, strict=True) if saved and name in weights}
    return found


def weight_layouts(assignment: Assignment, folded: Folded) -> dict[str, Layout]:
    """How each parameter that operators read is stored, by tensor name."""
    found: dict[str, Layout] = {}
    for number, copy in enumerate(folded.copies):
        found.update(zip(copy.weights, assignment.decision(number).weights, strict=True))
    return found


def resident_layouts(assignment: Assignment, folded: Folded) -> dict[str, Layout]:
    """How each buffer is held of which a rank has its part only, by tensor name: as its one reader reads it."""
    layouts: dict[str, Layout] = {}
    for number, block in enumerate(folded.blocks):
        places = list(_residents(block, folded.tensors))
        for copy in folded.copies_of(number) if places else ():
            operators = assignment.decision(copy).operators
            for op, operand, constant in places:
                layouts[folded.copies[copy].constants[constant]] = as_values(operators[op].operands[operand])
    return layouts


def _residents(block: Block, tensors: Tensors) -> Iterator[tuple[int, int, int]]:
    """Operators of a block that read such a buffer: their numbers, the operand, and its number among the constants."""
    constants = {name: number for number, name in enumerate(block.constants)}
    for number, op in enumerate(block.ops):
        if not constants.keys().isdisjoint(op.operands):
            call = Call.of(op, tensors)
            operand = rule_for(call).resident
            if operand is not None:
                yield number, operand, constants[op.operands[operand]]


def output_layouts(assignment: Assignment, folded: Folded) -> list[Layout]:
    return [_output(assignment, copy, export).layout for copy, export in folded.outputs]


def _output(assignment: Assignment, copy: int, export: int) -> OutputDecision:
    return next(output for output in assignment.decision(copy).outputs if output.export == export)


def stored_by_path(assignment: Assignment, folded: Folded) -> Mapping[str, Layout]:
    """The same by every path of every parameter, also of those that no operator reads: they are whole."""
    layouts, whole = weight_layouts(assignment, folded), (R,) * len(assignment.mesh)
    return {path: layouts.get(leaf.tensor, whole) for leaf in folded.parameters for path in leaf.paths}
