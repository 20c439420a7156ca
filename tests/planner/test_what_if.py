"""What else the operators of a plan could do: the same as `explain` finds, within memory, and in bounded time."""

import pytest

from tapas.errors import PlanError
from tapas.planner.explain import explain, what_if
from tapas.planner.pipeline import plan_graph
from tapas.planner.request import Request
from tests.distributed.small import EAGER
from tests.subjects import small_subject


def test_the_same_as_an_explanation() -> None:
    graph, request = small_subject("llama").graph, Request.of("2", EAGER, memory=None, baselines=False)
    found = what_if(graph, request, plan_graph(graph, request), 60.0)
    assert found.left == 0 and len(found.operators) > 8
    subject = next(op.subject for op in found.operators if op.subject.name.endswith("q_proj"))
    (wanted,) = (s for s in explain(graph, request, "*q_proj").subjects if s.kind != "weight")
    assert [(a.axis, a.does) for a in subject.alternatives] == [(a.axis, a.does) for a in wanted.alternatives]
    assert [a.cost for a in subject.alternatives] == pytest.approx([a.cost for a in wanted.alternatives])


@pytest.mark.full
def test_alternatives_fit_where_the_plan_has_to() -> None:
    graph = small_subject("llama").graph
    fastest = sum(plan_graph(graph, Request.of("2", EAGER, memory=None, baselines=False)).memory.values())
    request = Request.of("2", EAGER, memory=0.9 * fastest, baselines=False)
    plan = plan_graph(graph, request)
    found = what_if(graph, request, plan, 1.0)
    others = [a for op in found.operators for a in op.subject.alternatives if a.cost is not None]
    assert others and all(a.nbytes <= 0.9 * fastest and a.cost >= plan.bound * (1 - 1e-9) for a in others)


@pytest.mark.full
def test_an_explanation_keeps_within_memory() -> None:
    """Its plan is the one that is planned, and its alternatives fit as well."""
    graph = small_subject("llama").graph
    fastest = sum(plan_graph(graph, Request.of("2", EAGER, memory=None, baselines=False)).memory.values())
    request = Request.of("2", EAGER, memory=0.9 * fastest, baselines=False)
    found = explain(graph, request, "model.layers.*.q_proj", limit=1)
    assert found.plan.cost == pytest.approx(plan_graph(graph, request).cost, rel=1e-3)
    assert sum(found.plan.memory.values()) <= 0.9 * fastest
    others = [a for s in found.subjects for a in s.alternatives if a.cost is not None]
    assert others and all(a.nbytes <= 0.9 * fastest and a.cost >= found.plan.bound * (1 - 1e-9) for a in others)


def test_no_time_and_another_plan() -> None:
    graph, request = small_subject("llama").graph, Request.of("2", EAGER, memory=None, baselines=False)
    plan = plan_graph(graph, request)
    found = what_if(graph, request, plan, 0.0)
    assert found.left > 8 and all(op.subject.alternatives == () for op in found.operators) and found.cost == plan.cost
    with pytest.raises(PlanError, match="cannot be chosen"):
        what_if(graph, Request.of("4", EAGER, memory=None, baselines=False), plan, 1.0)
