"""Timelines as files for Perfetto (ui.perfetto.dev), in the format of Chrome's traces: a process is a rank, a thread
one of its lanes."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tapas.errors import TapasError
from tapas.plan.lanes import COMPUTE, LANES
from tapas.plan.plan import Plan
from tapas.plan.simulate import SimulatedStep, Task, simulate
from tapas.util import check_target, write_file

SUFFIXES = (".json", ".json.gz")


@dataclass(frozen=True)
class Span:
    """Something in a lane of a trace."""

    lane: str
    name: str
    category: str  # "operator", "runtime", "wait" or "collective"
    start: int  # nanoseconds
    end: int
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


def check_trace(path: str | Path) -> None:
    """Refuses what cannot be written, before anything is done."""
    if not str(path).endswith(SUFFIXES):
        raise TapasError(f"--trace {path}", "is not the name of a trace", "end it in .json or .json.gz")
    check_target(path)


def write_trace(path: str | Path, events: Iterable[Mapping[str, Any]], about: Mapping[str, str]) -> None:
    trace = {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": dict(about)}
    content = json.dumps(trace).encode()
    write_file(path, gzip.compress(content, mtime=0) if str(path).endswith(".gz") else content)


def rank_events(number: int, title: str, spans: Iterable[Span], start: int) -> Iterator[dict[str, Any]]:
    """What a rank does; `start`: of the step."""
    yield _named("process_name", number, 0, title)
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
    spans = list(without_crossings(spans))
    lanes = sorted(
        dict.fromkeys(span.lane for span in spans),
        key=lambda lane: next((i for i, part in enumerate(LANES) if part in lane), len(LANES)),
    )
    for thread, lane in enumerate(lanes):
        yield _named("thread_name", number, thread, lane)
        yield {"ph": "M", "name": "thread_sort_index", "pid": number, "tid": thread, "args": {"sort_index": thread}}
        for span in (span for span in spans if span.lane == lane):
            yield {
                "ph": "X", "pid": number, "tid": thread, "name": span.name, "cat": span.category,
                "ts": (span.start - start) / 1000, "dur": (span.end - span.start) / 1000, "args": dict(span.details),
            }  # fmt: skip


def _named(what: str, number: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": number, "tid": thread, "args": {"name": name}}


def without_crossings(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans of a lane lie in each other or apart, collectives always apart: one that does not fit goes to a lane of its
    own beside it."""
    ends: dict[str, list[int]] = {}  # of what is open in a lane, the innermost last
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        number, lane = 1, span.lane
        while not _fits(span, ends.setdefault(lane, [])):
            number += 1
            lane = f"{span.lane} ({number})"
        ends[lane].append(span.end)
        yield replace(span, lane=lane)


def _fits(span: Span, open_ends: list[int]) -> bool:
    while open_ends and open_ends[-1] <= span.start:
        open_ends.pop()
    return not open_ends or (span.end <= open_ends[-1] and span.category != "collective")


def write_simulated(path: str | Path, plan: Plan) -> None:
    """One step of the plan, as it would run on one of its devices."""
    step = simulate(plan)
    assert step is not None  # of a plan that has just been made
    about = {"model": plan.model, "mesh": "x".join(map(str, plan.mesh["sizes"])), "tool": "tapas plan --trace"}
    spans = simulated_spans(step, [copy.path for copy in plan.assignment.structure.copies])
    write_trace(path, rank_events(0, "a device, simulated", spans, 0), about)


def simulated_spans(step: SimulatedStep, paths: Sequence[str]) -> Iterator[Span]:
    """`paths`: of the copies. Every task, inside of its block's turn."""
    for turn in step.turns:
        name = paths[turn.copy] or turn.name
        yield Span(COMPUTE, f"{name} {turn.phase}", "block", _ns(turn.start), _ns(turn.end))
        yield from map(_span, turn.tasks, turn.starts)
    for message in step.messages:
        yield from map(_span, message.tasks, message.starts)


def _span(task: Task, start: float) -> Span:
    category = "operator" if task.lane == COMPUTE else "collective"
    return Span(task.lane, task.name, category, _ns(start), _ns(start + task.seconds), task.details)


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
