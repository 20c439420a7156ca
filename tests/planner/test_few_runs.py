"""Plans within a limit whose layers do the same in few runs."""

from dataclasses import replace

import pytest

from tapas.capture import capture
from tapas.ir.graph import Graph
from tapas.models.load import load
from tapas.planner.few_runs import SLIGHTLY, Simplified, count_runs, with_fewest_runs
from tapas.planner.fit import LimitedProblem, search
from tapas.planner.pipeline import plan_graph, within
from tapas.planner.request import Request
from tapas.planner.solution import Solution


@pytest.fixture(scope="module")
def graph() -> Graph:
    loaded = load("llama3-8b", batch=16, seq=512, settings={"num_hidden_layers": "12"})
    return capture(loaded.model, loaded.inputs, name="llama")


@pytest.fixture(scope="module")
def limits(graph: Graph) -> LimitedProblem:
    """Halfway between the smallest and the fastest plan."""
    asked = within(graph, Request.of("8", memory=None))
    fastest, smallest = search(asked.problem, asked.rows).peak.nbytes, asked.smallest().nbytes
    return replace(asked, limit=(fastest + smallest) / 2, learnt={})


@pytest.fixture(scope="module")
def striped(limits: LimitedProblem) -> Solution:
    """The best plan, but for one layer in the middle that does what one of another run does."""
    found = limits.best()
    copies = max(limits.fitting().families, key=len)
    choices = list(found.answer.choices)
    kinds = list(dict.fromkeys(choices[c] for c in copies))
    assert len(kinds) > 1, "the limit mixes what layers do"
    middle = copies[len(copies) // 4]
    choices[middle] = next(own for own in kinds if own != choices[middle])
    answer = replace(found.answer, choices=tuple(choices))
    solution = Solution(found.problem, answer)
    cost = sum(solution.seconds().values()) - solution.seconds()["hidden"]
    return Solution(found.problem, replace(answer, cost=cost))


def checked(limits: LimitedProblem, found: Simplified) -> Simplified:
    """What it says is what its plan is."""
    fitting, solution = limits.fitting(), found.solution
    assert found.runs == count_runs(fitting, solution.answer.choices)
    assert limits.limit is not None and solution.peak.nbytes <= limits.limit
    seconds = solution.seconds()
    assert solution.answer.cost == pytest.approx(sum(seconds.values()) - seconds["hidden"], rel=1e-9)
    return found


def test_stripes_are_joined(limits: LimitedProblem, striped: Solution) -> None:
    before = count_runs(limits.fitting(), striped.answer.choices)
    found = checked(limits, with_fewest_runs(limits, striped))
    assert found.runs < before == found.faster_runs
    assert found.faster == striped.answer.cost
    assert found.solution.answer.cost <= striped.answer.cost * (1 + SLIGHTLY)


def test_the_bound_stays(limits: LimitedProblem) -> None:
    best = limits.best()
    found = checked(limits, with_fewest_runs(limits, best))
    assert found.solution.answer.bound == pytest.approx(min(best.answer.bound, found.solution.answer.cost))
    assert found.solution.answer.cost >= best.answer.cost * (1 - 1e-9)


def test_without_a_limit_the_fastest_stays(limits: LimitedProblem) -> None:
    free = replace(limits, limit=None)
    best = free.best()
    assert with_fewest_runs(free, best).solution is best


def test_a_plan_says_what_it_costs(graph: Graph, limits: LimitedProblem) -> None:
    plan = plan_graph(graph, Request.of("8", memory=limits.limit, baselines=False))
    assert not plan.faster and "Layers do the same" not in str(plan)
    text = str(replace(plan, faster={"cost": plan.cost / 1.0005, "runs": 2, "instead_of": 5}))
    assert "2 runs, which takes 0.05% longer than the fastest plan known, of 5 runs" in " ".join(text.split())


@pytest.mark.full
def test_llama_has_fewer_runs() -> None:
    loaded = load("llama3-70b")
    graph = capture(loaded.model, loaded.inputs, name="llama3-70b")
    plan = plan_graph(graph, Request.of("8x8", memory="30GB", baselines=False))
    assert plan.faster["runs"] < plan.faster["instead_of"]
    assert plan.bound <= plan.faster["cost"] <= plan.cost <= plan.faster["cost"] * (1 + SLIGHTLY)
