"""What is read from a profile: whose an event is, what was under way, and what of it was hidden.

Profiles of GPUs are written by hand here, in the form in which torch's profiler writes them: no test needs one.
"""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tapas.errors import TapasError
from tapas.ir.graph import Graph
from tapas.plan.lanes import AHEAD, BEHIND, COMPUTE, HOST, MOVES
from tapas.plan.perfetto import Span, without_crossings
from tapas.runtime.recorder import (
    NAME,
    OPTIMIZER,
    STEP,
    WAIT,
    CopyMark,
    Mark,
    MoveMark,
    OperatorMark,
    SentMark,
)
from tapas.verify.intervals import common, length, union, without
from tapas.verify.subject import capture_subject
from tapas.verify.timeline import Overlap, timeline
from tapas.verify.trace import TraceRequest

some_intervals = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple))


@given(some_intervals, some_intervals)
def test_intervals_are_sets_of_moments(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    a, b = ({moment for start, end in part for moment in range(start, end)} for part in (first, second))
    for made, wanted in (
        (union(first), a), (common(union(first), union(second)), a & b), (without(union(first), union(second)), a - b),
    ):  # fmt: skip
        assert {moment for start, end in made for moment in range(start, end)} == wanted
        assert length(made) == len(wanted)
        assert all(before[1] < after[0] for before, after in pairwise(made))


@cache
def graph() -> Graph:
    return capture_subject(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.zeros(2, 4),)).graph


MARKS: list[Mark] = [
    STEP, CopyMark(1), OperatorMark(0), WAIT, OPTIMIZER, MoveMark(0, "P -> R"),
    SentMark(AHEAD, "forward", "all_gather", (0,), 64, weights=("1.weight", "1.bias"), timed=True),
    SentMark(BEHIND, "backward", "reduce_scatter", (0,), 32, backward=True, shapes=((8,), (4, 2))),
    SentMark(MOVES, "forward", "all_reduce", (0,), 16, shapes=((8,),)),
]  # fmt: skip
STEP_MARK, COPY, OPERATOR, WAITING, UPDATE, MOVE, GATHER, SCATTER, REDUCE = (f"{NAME}{n}" for n in range(len(MARKS)))
NODE = "autograd::engine::evaluate_function: AddmmBackward0"


def event(name: str, start: float, end: float, thread: int = 1, kind: str = "cpu_op", **args: Any) -> dict[str, Any]:
    given = {key.replace("_", " "): value for key, value in args.items()}
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": start,
        "dur": end - start,
        "args": given,
    }


def profile(*events: dict[str, Any]) -> dict[str, Any]:
    everything = [event(STEP_MARK, 0, 1000), event("aten::warm_up", -90, -80), *events]
    return {"baseTimeNanoseconds": 1_000_000, "traceEvents": everything}


def on(spans: tuple[Span, ...], lane: str) -> list[tuple[str, float, float]]:
    return [(s.name, (s.start - 1_000_000) / 1000, (s.end - 1_000_000) / 1000) for s in spans if s.lane == lane]


def microseconds(overlap: Overlap) -> Any:
    """Under way and hidden, in microseconds."""
    return pytest.approx((overlap.seconds * 1e6, overlap.hidden * 1e6))


FORWARD = (
    event(COPY, 10, 280), event(OPERATOR, 20, 100), event("aten::linear", 25, 90, Sequence_number=4),
    event("aten::addmm", 30, 80, Sequence_number=5),
)  # fmt: skip


def test_what_is_hidden_on_a_host() -> None:
    made = timeline(
        profile(
            *FORWARD,
            event(GATHER, 60, 150, kind="user_annotation"),  # ends on another thread
            event(WAITING, 110, 160),
            event(MOVE, 200, 260), event("aten::clone", 205, 210),
            event(REDUCE, 210, 250), event("c10d::allreduce_", 220, 222),
            event("gloo:all_reduce", 221, 249, 9, "user_annotation", Input_Dims=[[8]]),
            event(SCATTER, 300, 310, kind="user_annotation"), event("c10d::reduce_scatter_tensor_coalesced_", 301, 309),
            event("gloo:all_reduce", 330, 400, 9, "user_annotation", Input_Dims=[[8]]),
            event("aten::cat", 332, 349, 9),
            event("gloo:all_reduce", 331, 420, 8, "user_annotation", Input_Dims=[[4, 2]]),
            event(NODE, 350, 410, Sequence_number=5), event("AddmmBackward0", 351, 409), event("aten::mm", 352, 408),
            event(UPDATE, 500, 600),
        ),
        MARKS, graph(), ["tp"],
    )  # fmt: skip
    second = graph().ops[1]
    moves, ahead, behind = made.overlaps
    assert second.module == "1"
    assert on(made.spans, COMPUTE) == [
        ("1 linear", 20, 100), ("wait", 110, 160), ("aten::clone", 205, 210), ("1 linear backward", 350, 410),
        ("optimizer step", 500, 600),
    ]  # fmt: skip
    assert microseconds(ahead) == (90, 40)  # 60 to 150, of which 60 to 100 beside the operator
    assert microseconds(behind) == (120, 60)  # 300 to 420, of which 350 to 410
    assert microseconds(moves) == (30, 0)  # from where it is sent
    assert microseconds(made.total) == (240, 100)
    assert [(o.collectives, o.nbytes) for o in made.overlaps] == [(1, 16), (1, 64), (1, 32)]
    assert on(made.spans, AHEAD) == [("all-gather over tp: 1", 60, 150)]
    assert on(made.spans, BEHIND) == [("reduce-scatter over tp", 300, 420)]
    assert on(made.spans, MOVES) == [("all-reduce over tp: 1 linear", 220, 250)]


def test_what_is_hidden_on_a_gpu() -> None:
    def launch(start: float, end: float, thread: int, correlation: int) -> dict[str, Any]:
        return event("cudaLaunchKernel", start, end, thread, "cuda_runtime", correlation=correlation)

    made = timeline(
        profile(
            *FORWARD,
            launch(35, 40, 1, 7),
            event(GATHER, 110, 150), launch(112, 114, 1, 9),
            launch(120, 125, 1, 10),
            event(NODE, 200, 300, 2, Sequence_number=5),
            launch(210, 215, 2, 8),
            event("gemm", 40, 140, 7, "kernel", stream=7, correlation=7),
            event("gemm", 220, 320, 7, "kernel", stream=7, correlation=8),
            event("copy", 115, 130, 20, "kernel", stream=20, correlation=9),
            event("ncclDevKernel_AllGather_RING_LL", 130, 230, 20, "kernel", stream=20, correlation=10),
            event("of another step", 500, 600, 7, "kernel", stream=7, correlation=99),
        ),
        [*MARKS[:6], SentMark(AHEAD, "forward", "all_gather", (0,), 64, weights=("1.weight",)), *MARKS[7:]],
        graph(), ["tp"],
    )  # fmt: skip
    moves, ahead, behind = made.overlaps
    assert microseconds(ahead) == (100, 20)  # the kernel from 130 to 230; products end at 140 and begin at 220
    assert (moves.seconds, behind.seconds) == (0, 0)
    assert on(made.spans, f"stream 7: {COMPUTE}") == [("1 linear", 40, 140), ("1 linear backward", 220, 320)]
    assert on(made.spans, f"stream 20: {AHEAD}") == [("copy", 115, 130), ("all-gather over tp: 1", 130, 230)]
    assert {name for name, *_ in on(made.spans, HOST)} == {"1 linear", "1 linear backward"}


def test_an_end_that_nobody_saw_is_no_guess() -> None:
    with pytest.raises(RuntimeError, match=r"not seen the end of reduce_scatter .* shape \(4, 2\)"):
        timeline(
            profile(
                event(SCATTER, 300, 310, kind="user_annotation"),
                event("gloo:all_reduce", 330, 400, 9, "user_annotation", Input_Dims=[[8]]),
            ),
            MARKS, graph(), ["tp"],
        )  # fmt: skip


def test_collectives_that_overlap_are_side_by_side() -> None:
    spans = [Span(AHEAD, name, "collective", *when) for name, when in {"a": (0, 9), "b": (1, 5), "c": (6, 8)}.items()]
    spans += [Span(COMPUTE, name, "operator", *when) for name, when in {"d": (0, 9), "e": (1, 5), "f": (6, 10)}.items()]
    assert {s.name: s.lane.removeprefix(AHEAD).removeprefix(COMPUTE) for s in without_crossings(spans)} == {
        "a": "", "b": " (2)", "c": " (2)", "d": "", "e": "", "f": " (2)",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "device", "in_process", "said"),
    [
        ("step.txt", "cpu", False, r"end it in \.json or \.json\.gz"),
        ("nowhere/step.json", "cpu", False, "folder does not exist"),
        ("step.json", "cpu", True, "leave --in-process away"),
        ("step.json", "tpu", False, "use one of cpu, cuda"),
        (None, "cuda", False, "give --trace FILE"),
    ],
)
def test_a_trace_that_cannot_be_made_is_refused(
    path: str | None, device: str, in_process: bool, said: str, tmp_path: Path
) -> None:
    with pytest.raises(TapasError, match=said):
        TraceRequest.of(tmp_path / path if path else None, device, in_process)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TapasError, match="there is none here"):
        TraceRequest.of(tmp_path / "step.json", "cuda", False)
