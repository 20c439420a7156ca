"""A step, simulated: all that the plan counts is in it, and the streams do one thing at a time."""

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tapas.plan.lanes import AHEAD, BEHIND, COMPUTE, MOVES
from tapas.plan.perfetto import simulated_spans
from tapas.plan.plan import Plan, plan_from_dict
from tapas.plan.simulate import Script, SimulatedStep, Task, copies_of, scheduled, simulate
from tapas.planner.pipeline import plan_graph
from tapas.planner.request import Request
from tests.cli.test_cli import MODEL, refused, run
from tests.distributed.small import EAGER
from tests.subjects import small_subject

ASKED = {
    "free": {}, "fsdp": {"pins": ("*=fsdp",)}, "sequence": {"pins": ("*=megatron-sp",)},
    "again": {"pins": ("*=fsdp",), "recompute": "block"},
    "gathered again": {"pins": ("*=fsdp",), "recompute": "gather"},
    "inference": {"training": False, "pins": ("*=megatron",)},
}  # fmt: skip


def planned(family: str, mesh: str, asked: str, overlap: float = 1.0) -> Plan:
    request = Request.of(mesh, replace(EAGER, overlap=overlap), baselines=False, **ASKED[asked])
    return plan_graph(small_subject(family).graph, request)


def simulated(plan: Plan) -> SimulatedStep:
    step = simulate(plan)
    assert step is not None
    return step


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_what_the_plan_counts_is_what_runs(family: str, asked: str) -> None:
    plan = planned(family, "2x2", asked)
    step = simulated(plan)
    counted = plan.seconds
    assert step.compute == pytest.approx(counted["compute"] - _repeated_traffic(plan), rel=1e-9)
    sent = counted["communication"] + counted["hidden"] + _repeated_traffic(plan)
    assert step.sent == pytest.approx(sent, rel=1e-6)
    assert step.seconds >= max(step.compute, sum(m.end - m.start for m in step.messages)) * (1 - 1e-9)


def _repeated_traffic(plan: Plan) -> float:
    """What operators send inside when they are computed again counts as computed there."""
    return sum(op.copies * op.sent_forward for op in plan.operators if op.again)


@pytest.mark.parametrize("overlap", [0.0, 0.4, 1.0])
def test_what_does_not_overlap_takes_the_time_of_what_computes(overlap: float) -> None:
    step = simulated(planned("llama", "4", "fsdp", overlap))
    side = sum(message.end - message.start for message in step.messages)
    assert step.seconds >= step.compute + (1 - overlap) * (side - step.messages[0].end) * (1 - 1e-9)
    if overlap == 0:
        assert step.hidden <= step.messages[0].end + 1e-12


def test_no_stream_does_two_things_at_once_and_weights_arrive_first() -> None:
    plan = planned("llama", "4", "gathered again")
    step = simulated(plan)
    for stream in (step.turns, step.messages):
        assert all(one.end <= two.start + 1e-12 for one, two in pairwise(stream))
    scripts = copies_of(plan)
    assert scripts is not None
    gathered = {m.copy: m for m in step.messages[: sum(bool(s.gathers) for s in scripts)]}
    forward = {t.copy: t for t in step.turns if t.phase == "forward"}
    assert len(gathered) > 2 and all(m.end <= forward[c].start + 1e-12 for c, m in gathered.items() if c in forward)
    later = sorted(gathered)[1:]
    assert any(gathered[c].start < forward[c - 1].end for c in later if c - 1 in forward)  # beside the block before


def test_a_small_step_by_hand() -> None:
    """Two layers of 3 s forward and 6 s backward; 2 s to gather, 4 s to reduce; 1 s of update."""

    def tasks(lane: str, seconds: float) -> tuple[Task, ...]:
        return (Task(lane, "x", seconds),)

    layer = Script("layer", tasks(COMPUTE, 3), tasks(COMPUTE, 6), tasks(AHEAD, 2), (), tasks(BEHIND, 4))
    step = scheduled([layer, layer], update=1.0)
    assert [(t.start, t.end) for t in step.turns] == [(2, 5), (5, 8), (8, 14), (14, 20), (24, 25)]
    assert [(m.start, m.end) for m in step.messages] == [(0, 2), (2, 4), (14, 18), (20, 24)]
    assert (step.seconds, step.compute, step.sent, step.exposed, step.hidden) == (25, 19, 12, 6, 6)


def test_nothing_starts_before_the_host_has_launched_it() -> None:
    """Four operators of 1, 9, 1 and 1 s, 3 s to launch each: the device waits, catches up, and waits again."""
    forward = tuple(Task(COMPUTE, "x", seconds) for seconds in (1, 9, 1, 1))
    step = scheduled([Script("layer", forward)], update=None, host_seconds=3)
    assert step.turns[0].starts == (3, 6, 15, 16) and step.seconds == 17
    assert (step.compute, step.exposed, step.held, step.hidden) == (12, 5, 5, 0)


def test_plan_files_from_before_have_no_timeline() -> None:
    plan = planned("llama", "2", "fsdp")
    data = plan.to_dict()
    for move in data["moves"]:
        del move["numbers"]
    for op in data["operators"]:
        del op["forward"], op["sent_forward"], op["again"]
    assert simulate(plan_from_dict(data)) is None
    assert "Simulated" not in str(plan_from_dict(data)) and "Simulated" in str(plan)


def test_the_trace_has_every_task_and_nothing_crosses() -> None:
    plan = planned("llama", "2x2", "sequence")
    step = simulated(plan)
    spans = list(simulated_spans(step, [copy.path for copy in plan.assignment.structure.copies]))
    lengths: dict[str, float] = defaultdict(float)
    for span in spans:
        lengths[span.lane] += (span.end - span.start) / 1e9 * (span.category != "block")
    tasks = [t for turn in step.turns for t in turn.tasks] + [t for m in step.messages for t in m.tasks]
    for lane in (COMPUTE, MOVES, AHEAD, BEHIND):
        wanted = sum(task.seconds for task in tasks if task.lane == lane)
        assert lengths[lane] == pytest.approx(wanted, abs=1e-9 * len(tasks))


def test_the_command_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "step.json.gz"
    assert run("plan", *MODEL, "--mesh", "2x2", "--no-baselines", "--trace", file).exit_code == 0
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert COMPUTE in lanes and all(not lane.endswith(")") for lane in lanes)  # nothing had to go beside another
    assert "end it in .json" in refused("plan", *MODEL, "--mesh", "2x2", "--trace", str(tmp_path / "step.txt"))
