"""One step of all ranks as a file for Perfetto, and how much of what was sent was hidden behind computation."""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tapas.errors import TapasError
from tapas.util import check_target, write_file
from tapas.verify.processes import run_ranks
from tapas.verify.recorded_step import RecordedStep, RecordedTrial
from tapas.verify.timeline import COMPUTE, HOST, ROLES, Overlap, Span, summed
from tapas.verify.traffic import SentBytes, compare_traffic
from tapas.verify.trial import Trial

RANK = "tapas.verify.traced_rank"  # the module that each process runs
DEVICES = ("cpu", "cuda")
SUFFIXES = (".json", ".json.gz")


@dataclass(frozen=True)
class TraceRequest:
    """Where a trace is to be written, and where the step is to run."""

    path: Path
    device: str = "cpu"

    @classmethod
    def of(cls, path: str | Path | None, device: str, in_process: bool) -> "TraceRequest | None":
        """Refuses what cannot be done, before anything is."""
        if path is None:
            if device != "cpu":
                raise TapasError(f"trace device {device}", "no trace was asked for", "give --trace FILE as well")
            return None
        place = f"--trace {path}"
        if not str(path).endswith(SUFFIXES):
            raise TapasError(place, "is not the name of a trace", "end it in .json or .json.gz")
        check_target(path)
        if in_process:
            fact = "ranks that are threads have no process groups, and nothing is sent while they compute"
            raise TapasError(place, fact, "leave --in-process away")
        if device not in DEVICES:
            raise TapasError(f"trace device {device}", "is not known", f"use one of {', '.join(DEVICES)}")
        if device == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise TapasError("trace device cuda", "there is none here", "leave it out to record on CPUs")
        return cls(Path(path), device)


@dataclass(frozen=True)
class Trace:
    """What is told of a recorded step."""

    path: str
    device: str
    seconds: float  # of the step, with the profiler's own; on the slowest rank
    overlaps: tuple[Overlap, ...]  # by role: the most that a rank sent, and the mean of their times
    total: Overlap
    ranks: tuple[tuple[Overlap, ...], ...]
    sent: tuple[SentBytes, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path, "device": self.device, "seconds": self.seconds,
            "overlaps": [overlap_dict(overlap) for overlap in (*self.overlaps, self.total)],
            "ranks": [[overlap_dict(overlap) for overlap in rank] for rank in self.ranks],
            "collectives": [asdict(s) | {"ok": s.ok} for s in self.sent],
        }  # fmt: skip


def overlap_dict(overlap: Overlap) -> dict[str, Any]:
    return asdict(overlap) | {"share": share(overlap)}


def share(overlap: Overlap) -> float | None:
    """Of the time under way, what was hidden; None: nothing was under way."""
    return overlap.hidden / overlap.seconds if overlap.seconds else None


def trace_step(trial: Trial, request: TraceRequest, timeout: float) -> Trace:
    """Run the program anew, record one of its steps, and write that down."""
    ranks: list[RecordedStep] = run_ranks(RANK, RecordedTrial(trial, request.device), trial.mesh.devices, timeout)
    content = json.dumps(chrome_trace(ranks, trial, request.device)).encode()
    write_file(request.path, gzip.compress(content, mtime=0) if request.path.suffix == ".gz" else content)
    return trace_of(ranks, trial, request)


def trace_of(ranks: Sequence[RecordedStep], trial: Trial, request: TraceRequest) -> Trace:
    lanes = [rank.timeline for rank in ranks]
    return Trace(
        str(request.path), request.device, max(lane.end - lane.start for lane in lanes) / 1e9,
        tuple(summed((lane.overlaps[i] for lane in lanes), len(lanes)) for i in range(len(ROLES))),
        summed((lane.total for lane in lanes), len(lanes)), tuple((*lane.overlaps, lane.total) for lane in lanes),
        compare_traffic(trial.folded, trial.assignment, trial.mesh.names, [rank.sent for rank in ranks]),
    )  # fmt: skip


def chrome_trace(ranks: Sequence[RecordedStep], trial: Trial, device: str) -> dict[str, Any]:
    """In the format of Chrome's traces, which Perfetto reads: a process is a rank, a thread a lane."""
    start = min(rank.timeline.start for rank in ranks)
    events = [event for number, rank in enumerate(ranks) for event in _rank_events(number, rank, start)]
    about = {"model": trial.graph.name, "mesh": str(trial.mesh), "device": device, "tool": "tapas verify --trace"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _rank_events(number: int, rank: RecordedStep, start: int) -> Iterator[dict[str, Any]]:
    yield _named("process_name", number, 0, f"rank {number} at {rank.coord}")
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
    spans = list(without_crossings(rank.timeline.spans))
    order = (COMPUTE, HOST, *ROLES)
    lanes = sorted(
        dict.fromkeys(span.lane for span in spans),
        key=lambda lane: next((i for i, part in enumerate(order) if part in lane), len(order)),
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
