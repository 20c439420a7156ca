"""Plain data into a plan, or a reason why not: whatever is accepted here can be shown and run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from math import isfinite
from typing import Any, cast, get_args, get_origin, get_type_hints

from tapas.errors import ClusterError
from tapas.hardware.cluster_files import cluster_from_dict
from tapas.hardware.mesh import Mesh
from tapas.plan.assignment import Assignment, BlockDecision
from tapas.plan.fingerprint import BlockStructure, CopyStructure
from tapas.plan.plan import VERSION, Move, Operator, Plan, PlanBlock
from tapas.rules.base import MODES
from tapas.sharding.layout import Layout, State, parse_state
from tapas.sharding.route import Hop, Route, parse_hop

NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}

# what format 3 added, all of it for pictures: a plan of format 2 is read without
ADDED: dict[type, tuple[str, ...]] = {
    Plan: ("timeline",), Operator: ("factors", "operands", "results"), Move: ("copy", "source", "reader"),
    PlanBlock: ("hidden", "numbers"),
}  # fmt: skip
PHASES = ("forward", "backward", "update")

# what is one text in a file
TEXTS: dict[type, Callable[[str], Any]] = {State: parse_state, Hop: parse_hop}


def plain(value: Any) -> Any:
    """A plan, or a part of one, as data that JSON knows."""
    if type(value) in TEXTS:
        return str(value)
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in cast(dict[str, Any], value).items()}
    return [plain(item) for item in cast(list[Any], value)] if isinstance(value, (list, tuple)) else value


def upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """A plan of format 2 as one of format 3."""

    def with_added(kind: Any, value: Any) -> Any:
        if not isinstance(value, dict):
            return value  # damaged: whoever reads it says so
        found = {f.name: f for f in fields(kind) if f.name in ADDED[kind]}
        new = {name: plain(f.default) for name, f in found.items() if f.default is not MISSING}
        return {**new, **cast(dict[str, Any], value)}

    def each(kind: Any, values: Any) -> Any:
        return [with_added(kind, value) for value in cast(list[Any], values)] if isinstance(values, list) else values

    parts = {"operators": Operator, "moves": Move, "blocks": PlanBlock}
    listed = {name: each(kind, data[name]) for name, kind in parts.items() if name in data}
    return {**with_added(Plan, data), **listed, "version": VERSION}


def read_plan(data: Any) -> Plan:
    """The plan that a JSON file holds; ValueError says what is wrong with it."""
    plan = read(Plan, data, "it")
    try:
        sizes = read(list[int], plan.mesh.get("sizes"), "mesh.sizes")
        names = read(list[str], plan.mesh.get("names"), "mesh.names")
        _expect(len(sizes) == len(names), "mesh.names", "one name for each axis")
        axes = len(Mesh(tuple(sizes), tuple(names)).sizes)
        cluster_from_dict(plan.cluster)
    except ClusterError as error:
        raise ValueError(f"{error.place}: {error.fact}") from None
    _check_layouts(plan, axes)
    _check_assignment(plan.assignment, tuple(sizes))
    _check_places(plan)
    read(dict[str, int], plan.graph, "graph")
    read(dict[str, str], plan.source.get("settings", {}), "source.settings")
    _expect(read(int, plan.source.get("accumulate", 1), "source.accumulate") >= 1, "source.accumulate", "1 or more")
    read(bool, plan.source.get("compile", False), "source.compile")
    _expect(read(float, plan.source.get("capacity", 1.0), "source.capacity") >= 1, "source.capacity", "1 or more")
    if plan.faster:
        read(dict[str, float], {key: plan.faster.get(key) for key in ("cost", "runs", "instead_of")}, "faster")
        _expect(plan.faster["cost"] > 0, "faster.cost", "above 0")
    for move in plan.moves:
        for step in move.steps:
            read(list[str], step.get("axes"), "moves.steps.axes")
            read(str, step.get("forward"), "moves.steps.forward")
            read(str, step.get("backward"), "moves.steps.backward")
            for key in ("forward_seconds", "backward_seconds"):
                read(float, step.get(key, 0.0), f"moves.steps.{key}")
    for name, figures in plan.baselines.items():
        if figures.get("cost") is not None:
            read(dict[str, float], {k: figures.get(k) for k in ("cost", "ratio", "memory")}, f"baselines.{name}")
    return plan


def read(kind: Any, value: Any, place: str) -> Any:
    """A value as the type that an annotation asks for."""
    if kind is Any:
        return value
    if kind in TEXTS:
        return TEXTS[kind](_read_plain(str, value, place))
    if is_dataclass(kind):
        return _read_dataclass(kind, value, place)
    inner = get_args(kind)
    match get_origin(kind):
        case None:
            return _read_plain(kind, value, place)
        case made if made in (list, tuple):
            _expect(isinstance(value, list), place, "a list")
            kinds = inner if made is tuple and inner[-1] is not Ellipsis else (inner[0],) * len(value)
            _expect(len(kinds) == len(value), place, f"a list of {len(kinds)}")
            items = [read(k, item, f"{place}[{i}]") for i, (k, item) in enumerate(zip(kinds, value, strict=True))]
            return items if made is list else tuple(items)
        case _:
            _expect(isinstance(value, dict), place, "a table")
            return {key: read(inner[1], item, f"{place}.{key}") for key, item in value.items()}


def _read_dataclass(kind: Any, value: Any, place: str) -> Any:
    _expect(isinstance(value, dict), place, "a table")
    known = [f.name for f in fields(kind) if f.name in value or "later" not in f.metadata]
    missing, unknown = [n for n in known if n not in value], [n for n in value if n not in known]
    if missing or unknown:
        raise ValueError(f"{place} {'lacks' if missing else 'has unknown fields'} {', '.join(missing or unknown)}")
    hints = get_type_hints(kind)
    where = "" if place == "it" else f"{place}."
    return kind(**{name: read(hints[name], value[name], f"{where}{name}") for name in known})


def _read_plain(kind: type, value: Any, place: str) -> Any:
    allowed = (int, float) if kind is float else kind
    # a bool is an int to Python; JSON as Python reads it may hold NaN
    fits = isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
    _expect(fits and (not isinstance(value, float) or isfinite(value)), place, NAMES[kind])
    return value


def _expect(condition: bool, place: str, what: str) -> None:
    if not condition:
        raise ValueError(f"{place} is not {what}")


def _check_layouts(plan: Plan, axes: int) -> None:
    """One state for each axis, each of them readable."""

    def check(states: Sequence[str], place: str) -> None:
        _expect(len(states) == axes, place, f"one state for each of {axes} axes")
        for state in states:
            parse_state(state)

    for name, layout in plan.parameters.items():
        check(layout, f"parameters.{name}")
    for op in plan.operators:
        check(op.result, f"operators.{op.name}.result")
        fits = len(op.choice) == axes and len(op.roles) in (0, axes) and all(op.choice)
        _expect(fits, f"operators.{op.name}.choice", f"one choice for each of {axes} axes")
    for move in plan.moves:
        check(move.before, f"moves.{move.tensor}.before")
        check(move.after, f"moves.{move.tensor}.after")


def _check_places(plan: Plan) -> None:
    """Numbers of copies and of operators refer to those of the assignment."""
    structure, copies = plan.assignment.structure, range(len(plan.assignment.structure.copies))

    def operators(copy: int) -> int:
        return len(structure.blocks[structure.copies[copy].structure].operators)

    for block in plan.blocks:
        _expect(all(number in copies for number in block.numbers), f"blocks.{block.name}.numbers", "a list of copies")
    for move in plan.moves:
        _expect(move.copy in copies or move.copy == -1, f"moves.{move.tensor}.copy", "a copy of a block")
        _expect(all(number in copies for number in move.numbers), f"moves.{move.tensor}.numbers", "a list of copies")
        known = move.copy == -1 or -1 <= move.reader < operators(move.copy)
        _expect(known, f"moves.{move.tensor}.reader", "an operator of its block")
    for point in plan.timeline:
        _expect(point.phase in PHASES, "timeline.phase", f"one of {', '.join(PHASES)}")
        _expect(point.copy in copies, "timeline.copy", "a copy of a block")


def _check_assignment(assignment: Assignment, mesh: tuple[int, ...]) -> None:
    """Every number in it refers to something, and every layout and step is one of this mesh. Whether they are legal for
    the tensors of a model is told when a plan meets one."""
    structure, axes = assignment.structure, len(mesh)
    _expect(assignment.mesh == mesh, "assignment.mesh", f"{mesh}, as mesh.sizes")
    _expect(assignment.pieces >= 1, "assignment.pieces", "a whole number from 1 on")
    _expect(len(assignment.copies) == len(structure.copies), "assignment.copies", "one decision for each copy")
    for number, (copy, decided) in enumerate(zip(structure.copies, assignment.copies, strict=True)):
        place = f"assignment.structure.copies[{number}]"
        _expect(0 <= copy.structure < len(structure.blocks), place, "a copy of a block")
        _expect(0 <= decided < len(assignment.decisions), f"assignment.copies[{number}]", "the number of a decision")
        _check_ports(structure.blocks, structure.copies, number, place)
        _check_decision(assignment.decisions[decided], structure.blocks[copy.structure], f"decisions[{decided}]")
    for copy, export in structure.outputs:
        known = 0 <= copy < len(structure.copies) and any(o.export == export for o in assignment.decision(copy).outputs)
        _expect(known, "assignment.structure.outputs", "what a copy leaves as an output")
    for number, decision in enumerate(assignment.decisions):
        place = f"assignment.decisions[{number}]"
        _expect(decision.recompute in MODES, f"{place}.recompute", f"one of {', '.join(MODES)}")
        for layout in _layouts(decision):
            _expect(len(layout) == axes, place, f"one state for each of {axes} axes everywhere")
        for hop in (hop for route in _routes(decision) for hop in route):
            _expect(all(a < axes for a in hop.axes), f"{place}: {hop}", "a step over axes of the mesh")


def _check_ports(blocks: Sequence[BlockStructure], copies: Sequence[CopyStructure], number: int, place: str) -> None:
    copy = copies[number]
    _expect(len(copy.ports) == blocks[copy.structure].ports, place, "wired as its block says")
    for source, export in copy.ports:
        known = 0 <= source < number and 0 <= export < len(blocks[copies[source].structure].exports)
        _expect(known, f"{place}.ports", "what copies before it leave")


def _check_decision(decision: BlockDecision, block: BlockStructure, place: str) -> None:
    """As many decisions as there is to decide, and all that others read is there."""
    wanted = len(block.weights), block.ports, len(block.operators)
    found = len(decision.weights), len(decision.ports), len(decision.operators)
    _expect(wanted == found, f"assignment.{place}", "a decision for each weight, port and operator")
    for operator in decision.operators:
        _expect(len(operator.operands) == len(operator.routes), f"assignment.{place}", "a route for each operand")
    published = {tensor.tensor for tensor in decision.tensors}
    _expect(published.issuperset(block.exports), f"assignment.{place}", "a layout for each tensor that others read")
    known = {f"w{i}" for i in range(len(block.weights))}
    known |= {f"{i}.{r}" for i, operator in enumerate(decision.operators) for r in range(len(operator.results))}
    _expect(known.issuperset(published), f"assignment.{place}", "about tensors that its block has")


def _layouts(decision: BlockDecision) -> Iterator[Layout]:
    yield from (*decision.weights, *decision.ports)
    for operator in decision.operators:
        yield from (*operator.operands, *operator.results)
        yield tuple(State("R") for _ in operator.choice)  # as long as a layout
    yield from (tensor.layout for tensor in decision.tensors)
    yield from (output.layout for output in decision.outputs)


def _routes(decision: BlockDecision) -> Iterator[Route]:
    for operator in decision.operators:
        yield from operator.routes
    yield from (tensor.route for tensor in decision.tensors)
    yield from (output.route for output in decision.outputs)
