"""How much room experts have for tokens that are sent to them: every operator of experts says it, as an argument."""

from collections.abc import Iterable
from dataclasses import replace

from tapas.errors import PlanError
from tapas.ir.graph import Graph, Op

EXPERTS = "tapas.experts.default"


def with_capacity(graph: Graph, capacity: float | None) -> Graph:
    """The graph whose experts have so many times an equal share; None: as many as come."""
    if capacity is None:
        return graph
    if not any(op.target == EXPERTS for ops in (graph.ops, *(body.ops for body in graph.bodies)) for op in ops):
        fact = "this model has no experts that are one operator, to which tokens could be sent"
        raise PlanError(f"capacity {capacity:g}", fact, "leave it out")
    bodies = tuple(replace(body, ops=_said(body.ops, capacity)) for body in graph.bodies)
    return replace(graph, ops=_said(graph.ops, capacity), bodies=bodies)


def capacity_of(ops: Iterable[Op]) -> float | None:
    """What experts among these operators say."""
    return next((dict(op.kwargs)["capacity"] for op in ops if op.target == EXPERTS and op.kwargs), None)


def _said(ops: Iterable[Op], capacity: float) -> tuple[Op, ...]:
    return tuple(replace(op, kwargs=(("capacity", capacity),)) if op.target == EXPERTS else op for op in ops)
