"""Memory: what is predicted is what is allocated, activations that are computed again, and plans that have to fit."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from tapas.cost.memory import Optimizer
from tapas.errors import PlanError, TapasError
from tapas.hardware.cluster import memory_limit
from tapas.hardware.cluster_files import load_cluster
from tapas.ir.fold import fold
from tapas.planner.fit import DoesNotFit, LimitedProblem, search
from tapas.planner.memory import MemoryModel
from tapas.planner.pipeline import plan_graph, pose, within
from tapas.planner.request import Request
from tapas.problem.block_memory import KINDS
from tapas.problem.pins import pin_mode
from tapas.problem.problem import Problem
from tapas.rules.base import BLOCK, KEEP, MODES, SELECTIVE
from tapas.search import cost_of, solve
from tapas.verify.subject import Subject, capture_subject
from tests.distributed.small import EAGER, FAMILIES, llama, small
from tests.subjects import roomy_subject, small_subject
from tests.verify.solved import examine_solution, float64_mostly

CLOSE = 0.10  # relative: between what is predicted and what is allocated


def limits(
    family: str, mesh: str, limit: float | None = None, made: Callable[[str], Subject] = small_subject, **asked: Any
) -> LimitedProblem:
    return within(made(family).graph, Request.of(mesh, EAGER, memory=limit, **asked))


# --------------------------------------------------------------------------------------------- recomputing


def each(families: Iterable[str], modes: Iterable[str], quick: Callable[[str, str], bool]):
    """Families with modes; where it is not `quick`, in `make test-full` only."""
    cases = product(families, modes)
    marked = [pytest.param(*case, marks=() if quick(*case) else pytest.mark.full) for case in cases]
    return pytest.mark.parametrize(("family", "mode"), marked)


@each(
    FAMILIES,
    (SELECTIVE, BLOCK),
    lambda family, mode: (mode == SELECTIVE and family in ("gpt2", "mixtral", "resnet")) or family == "llama",
)
@float64_mostly
def test_computing_again_changes_nothing_but_time_and_traffic(
    family: str, mode: str, precisions: tuple[str, ...]
) -> None:
    """Numbers agree with the original, and bytes with the prediction: the forward part is sent twice."""
    asked = limits(family, "2x2", recompute=mode)
    solution = asked.best()
    assert {solution.mode(g) for g in solution.groups()} >= ({mode} if _has_modes(asked.problem) else set())
    report = examine_solution(small_subject(family), solution, precisions, in_process=True, steps=2)
    assert report.ok, [c for c in report.checks if not c.ok] + [s for x in report.sent.values() for s in x if not s.ok]


def _has_modes(problem: Problem) -> bool:
    return any(part.mode is not None for part in problem.blocks)


@each(
    FAMILIES,
    MODES,
    lambda family, mode: family in ("llama", "resnet") or (mode == BLOCK and family in ("gpt2", "mixtral")),
)
@float64_mostly
def test_predicted_memory_is_allocated(family: str, mode: str, precisions: tuple[str, ...]) -> None:
    solution = limits(family, "2", recompute=mode, made=roomy_subject).best()
    report = examine_solution(roomy_subject(family), solution, precisions, in_process=True, steps=2)
    assert report.ok
    assert report.memory.keys() == set(precisions)
    for used in report.memory.values():
        assert used.predicted_nbytes == pytest.approx(used.measured_nbytes, rel=CLOSE)


# ------------------------------------------------------------------------------------------------- fitting


@pytest.mark.full
def test_tighter_limits_are_never_faster() -> None:
    fastest = limits("llama", "2").best()
    least = limits("llama", "2").fitting().smallest[0].nbytes
    between = np.linspace(least * 1.01, fastest.peak.nbytes, 3)
    costs = [limits("llama", "2", limit).best().answer for limit in between]
    for tight, loose in pairwise(costs):
        assert loose.bound <= tight.cost * (1 + 1e-9)
    assert costs[-1].cost == pytest.approx(fastest.answer.cost)


def test_copies_are_arranged_so_that_the_peak_is_low() -> None:
    """Copies that hand on what they are handed may change places: the plan costs the same, and needs no more."""
    graph = capture_subject(*llama(4)).graph
    fitting = within(graph, Request.of("2", replace(EAGER, overlap=0.0), memory=None)).fitting()
    least = fitting.smallest[0]
    fastest = fitting.needed(solve(fitting.network).choices)
    fitting.within((least.nbytes + fastest.nbytes) / 2, fastest.moment)
    network, differing = fitting.problem.network({}), 0
    for choices in fitting.evaluated:
        whole = fitting.problem.widened(choices, fitting.rows)
        arranged = fitting.memory.arranged(whole)
        differing += arranged != whole or len({*whole}) > len(network.blocks)
        assert sorted(arranged) == sorted(whole)
        assert cost_of(network, arranged) == pytest.approx(cost_of(network, whole), rel=1e-12)
        assert fitting.memory.peak(arranged).nbytes <= fitting.memory.peak(whole).nbytes
    assert differing


@pytest.mark.full
def test_a_known_plan_that_fits_is_not_lost() -> None:
    """Also if it uses all of a limit."""
    fitting = limits("gpt2", "2", made=roomy_subject).fitting()
    least = fitting.smallest[0]
    choices, limit = min((fitting.needed(c).nbytes, c) for c in fitting.evaluated)[::-1]
    assert fitting.within(1.0 * limit, least.moment).cost <= cost_of(fitting.network, choices) * (1 + 1e-9)


def test_what_cannot_fit_is_said() -> None:
    with pytest.raises(DoesNotFit) as caught:
        limits("llama", "2", 1000.0).best()
    assert caught.value.bound > 1000 and caught.value.peak.nbytes >= caught.value.bound
    graph, cluster = small_subject("llama").graph, load_cluster("h100-sxm")
    with pytest.raises(PlanError, match=r"use \d+ devices \(--mesh \d+\)|do not help"):
        plan_graph(graph, Request.of("2", cluster, memory=caught.value.peak.nbytes / 1.5, baselines=False))


def test_memory_of_a_moment_adds_up() -> None:
    """What the search adds up in tables is what a plan is found to need."""
    asked = limits("llama", "2x2")
    fitting = asked.fitting()
    memory = MemoryModel(fitting.problem)
    answer = search(fitting.problem).answer
    need = memory.needed(answer.choices, fitting.families)
    load = fitting.load(need.moment, 0.0)
    assert load is not None
    amount = load.amount(fitting.problem.network({}), answer.choices)
    assert amount - load.limit == pytest.approx(need.nbytes, abs=len(KINDS))


def test_modes_can_be_pinned() -> None:
    problem, _ = pose(small_subject("llama").graph, Request.of("2", EAGER))
    times = [search(problem, pin_mode(problem, mode)).answer.cost for mode in (KEEP, SELECTIVE, BLOCK)]
    assert times == sorted(times) and times[0] < times[1] < times[2]
    peaks = [search(problem, pin_mode(problem, mode)).peak.nbytes for mode in (KEEP, SELECTIVE, BLOCK)]
    assert peaks == sorted(peaks, reverse=True)
    with pytest.raises(PlanError, match="did you mean block"):
        pin_mode(problem, "blocks")


def test_inference_keeps_nothing() -> None:
    graph = small_subject("llama").graph
    assert any(what.priced for what in fold(graph).leaving.values())
    model, inputs = small("llama")
    from tapas.capture import capture

    plain = capture(model, inputs, training=False)
    problem, _ = pose(plain, Request.of("2", EAGER))
    peak = search(problem).peak
    assert peak.kinds["activations"] >= 0 and not peak.kinds["gradients"] and not peak.kinds["optimizer"]
    assert peak.kinds["working"] > 0


# ------------------------------------------------------------------------------------------- what users say


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("40GB", 40e9), ("64 GiB", 64 * 2**30), (1e9, 1e9), ("1.5e9B", 1.5e9), ("none", None), (None, None)],
)
def test_amounts_of_memory(text: str | float | None, nbytes: float | None) -> None:
    assert memory_limit(text, EAGER) == nbytes


def test_a_device_keeps_a_reserve() -> None:
    assert memory_limit("device", EAGER) == pytest.approx(0.9 * EAGER.device.memory_bytes)


@pytest.mark.parametrize("text", ("", "much", "-4GB", "4 parsec", "0GB", "1e"))
def test_other_words_are_no_amounts(text: str) -> None:
    with pytest.raises(TapasError, match="is not an amount of memory"):
        memory_limit(text, EAGER)


@pytest.mark.parametrize("text", ("40", "0", "1.5e9"))
def test_an_amount_has_a_unit(text: str) -> None:
    with pytest.raises(TapasError, match=f"has no unit; write {text}GB"):
        memory_limit(text, EAGER)


@pytest.mark.parametrize(
    ("optimizer", "narrow", "full"),
    [
        (Optimizer(), 12, 8),
        (Optimizer("adam", master=False), 4, 8),
        (Optimizer("adam8bit"), 6, 2),
        (Optimizer("momentum"), 8, 4),
        (Optimizer("sgd"), 4, 0),
        (Optimizer("sgd", master=False), 0, 0),
    ],
)
def test_optimizers_keep_state(optimizer: Optimizer, narrow: int, full: int) -> None:
    assert (optimizer.state_bytes(2), optimizer.state_bytes(4)) == (narrow, full)


def test_an_optimizer_that_is_not_known() -> None:
    with pytest.raises(TapasError, match="did you mean adam"):
        Optimizer("adamw")


# ----------------------------------------------------------------------------------------- memory over the step


def test_over_time_the_peak_is_the_largest() -> None:
    """The points of a plan's timeline lead through its peak, and nothing is above it."""
    plan = plan_graph(small_subject("llama").graph, Request.of("2x2", EAGER, baselines=False))
    totals = [sum(point.nbytes.values()) for point in plan.timeline]
    assert max(totals) == sum(plan.memory.values()) and len(totals) >= 4
    phases = [point.phase for point in plan.timeline]
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)
    assert set(phases) == {"forward", "backward", "update"}
