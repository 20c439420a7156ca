"""Plain data into a plan, or a reason why not: whatever is accepted here can be shown and run."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any, get_args, get_origin, get_type_hints

from tapas.errors import ClusterError
from tapas.hardware.cluster import Mesh, cluster_from_dict
from tapas.plan.plan import Move, Plan, PlanBlock
from tapas.sharding.layout import parse_state

NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}

# fields that the first files of this version do not have
LATER: dict[type, dict[str, Any]] = {
    Plan: {"dtype": "", "limit": 0.0, "optimizer": "adam", "master": True},
    PlanBlock: {"recompute": "none", "tensors": []},
    Move: {"again": False},
}


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
    read(dict[str, int], plan.graph, "graph")
    read(dict[str, str], plan.source.get("settings", {}), "source.settings")
    for move in plan.moves:
        for step in move.steps:
            read(list[str], step.get("axes"), "moves.steps.axes")
            read(str, step.get("forward"), "moves.steps.forward")
            read(str, step.get("backward"), "moves.steps.backward")
    for name, figures in plan.baselines.items():
        if figures.get("cost") is not None:
            read(dict[str, float], {k: figures.get(k) for k in ("cost", "ratio", "memory")}, f"baselines.{name}")
    return plan


def read(kind: Any, value: Any, place: str) -> Any:
    """A value as the type that an annotation asks for."""
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _read_dataclass(kind, value, place)
    inner = get_args(kind)
    match get_origin(kind):
        case None:
            return _read_plain(kind, value, place)
        case made if made in (list, tuple):
            _expect(isinstance(value, list), place, "a list")
            return made(read(inner[0], item, f"{place}[{i}]") for i, item in enumerate(value))
        case _:
            _expect(isinstance(value, dict), place, "a table")
            return {key: read(inner[1], item, f"{place}.{key}") for key, item in value.items()}


def _read_dataclass(kind: Any, value: Any, place: str) -> Any:
    _expect(isinstance(value, dict), place, "a table")
    known = [f.name for f in fields(kind)]
    value = {**LATER.get(kind, {}), **value}
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
