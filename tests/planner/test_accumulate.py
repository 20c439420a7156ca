"""Several micro batches before each step of the optimizer: all but the update is done so many times."""

from dataclasses import replace

import pytest

from tapas.errors import TapasError
from tapas.hardware.cluster_files import load_cluster
from tapas.plan.plan import Plan
from tapas.plan.simulate import simulate
from tapas.planner.pipeline import plan_graph
from tapas.planner.request import Request
from tapas.report import plan_text
from tests.distributed.small import EAGER
from tests.subjects import small_subject


def planned(times: int, pin: str = "fsdp", overlap: float = 1.0) -> Plan:
    asked = Request.of("2x2", replace(EAGER, overlap=overlap), pins={"*": pin}, accumulate=times, baselines=False)
    return plan_graph(small_subject("llama").graph, asked)


@pytest.mark.parametrize("pin", ["fsdp", "megatron"])
def test_all_but_the_update_is_done_so_many_times(pin: str) -> None:
    one, four = planned(1, pin), planned(4, pin)
    assert one.assignment == four.assignment  # the pins leave nothing to choose that the update decides
    for kind in one.seconds.keys() - {"update", "compute"}:
        assert four.seconds[kind] == pytest.approx(4 * one.seconds[kind], rel=1e-5), kind
    assert four.seconds["update"] == one.seconds["update"] > 0
    assert four.cost == pytest.approx(4 * (one.cost - one.seconds["update"]) + one.seconds["update"], rel=1e-5)
    step = simulate(four)
    assert step is not None and step.seconds >= step.compute
    assert four.source["accumulate"] == 4 and "4 times before" in plan_text(four)


def test_gradients_are_there_all_the_time() -> None:
    one, four = planned(1), planned(4)
    whole = max(point.nbytes.get("gradients", 0) for point in four.timeline)
    assert all(point.nbytes["gradients"] == whole for point in four.timeline)
    assert sum(four.memory.values()) > sum(one.memory.values())
    assert min(point.nbytes.get("gradients", 0) for point in one.timeline) < whole


def test_no_strategy_is_cheaper() -> None:
    graph = small_subject("llama").graph
    for times in (1, 64):
        best = plan_graph(graph, Request.of("2", "h100-sxm", accumulate=times, baselines=("ddp", "fsdp")))
        known = [figures["cost"] for figures in best.baselines.values()]
        assert best.proof == "optimal" and all(best.cost <= cost * (1 + 1e-9) for cost in known)


def test_the_cluster_of_the_plan_is_the_users() -> None:
    assert planned(8).cluster["device"]["memory_bytes_per_s"] == EAGER.device.memory_bytes_per_s
    slow = load_cluster("h100-sxm").slowed(3)
    assert slow.device.peak("bfloat16") * 3 == pytest.approx(load_cluster("h100-sxm").device.peak("bfloat16"))


@pytest.mark.parametrize(("times", "training"), [(0, True), (2, False), ("2", True)])
def test_nonsense_is_refused(times: int, training: bool) -> None:
    with pytest.raises(TapasError, match="accumulate"):
        Request.of("2", EAGER, accumulate=times, training=training)
