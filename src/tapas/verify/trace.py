"""One step of all ranks as a file for Perfetto, and how much of what was sent was hidden behind computation."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tapas.errors import TapasError
from tapas.plan.perfetto import check_trace, rank_events, write_trace
from tapas.verify.processes import run_ranks
from tapas.verify.recorded_step import RecordedStep, RecordedTrial
from tapas.verify.timeline import ROLES, Overlap, summed
from tapas.verify.traffic import SentBytes, compare_traffic
from tapas.verify.trial import Trial

RANK = "tapas.verify.traced_rank"  # the module that each process runs
DEVICES = ("cpu", "cuda")


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
        check_trace(path)
        if in_process:
            fact = "ranks that are threads have no process groups, and nothing is sent while they compute"
            raise TapasError(f"--trace {path}", fact, "leave --in-process away")
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
    about = {"model": trial.graph.name, "mesh": str(trial.mesh), "device": request.device}
    write_trace(request.path, chrome_trace(ranks), {**about, "tool": "tapas verify --trace"})
    return trace_of(ranks, trial, request)


def trace_of(ranks: Sequence[RecordedStep], trial: Trial, request: TraceRequest) -> Trace:
    lanes = [rank.timeline for rank in ranks]
    return Trace(
        str(request.path), request.device, max(lane.end - lane.start for lane in lanes) / 1e9,
        tuple(summed((lane.overlaps[i] for lane in lanes), len(lanes)) for i in range(len(ROLES))),
        summed((lane.total for lane in lanes), len(lanes)), tuple((*lane.overlaps, lane.total) for lane in lanes),
        compare_traffic(trial.folded, trial.assignment, trial.mesh.names, [rank.sent for rank in ranks]),
    )  # fmt: skip


def chrome_trace(ranks: Sequence[RecordedStep]) -> Iterator[dict[str, Any]]:
    start = min(rank.timeline.start for rank in ranks)
    for number, rank in enumerate(ranks):
        yield from rank_events(number, f"rank {number} at {rank.coord}", rank.timeline.spans, start)
