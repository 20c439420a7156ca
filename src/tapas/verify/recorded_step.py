"""A step that is recorded, on one rank.

The program is the one that users run, in the model's own precision, with the dropout that verification leaves out.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tapas._torch import local_part
from tapas.runtime.collectives import Count
from tapas.runtime.executor import Options
from tapas.runtime.recorder import OPTIMIZER, STEP, StepRecorder
from tapas.verify.marked_program import mark_program
from tapas.verify.rank import parallel_stepper
from tapas.verify.steps import EPSILON, RATE, Stepper
from tapas.verify.timeline import Timeline, timeline
from tapas.verify.trial import Trial

WARM_UP = 2  # steps that are not recorded: memory is got, groups connect; one more under the profiler


@dataclass(frozen=True)
class RecordedTrial:
    """What every rank is given."""

    trial: Trial
    device: str  # "cpu" or "cuda"


@dataclass(frozen=True)
class RecordedStep:
    """What a rank hands in."""

    coord: tuple[int, ...]
    timeline: Timeline
    sent: Count  # as the runtime has counted it


def take_step(stepper: Stepper, optimizer: torch.optim.Optimizer | None, recorder: StepRecorder) -> None:
    """All of a training step, or of a forward pass where there is nothing to train."""
    if optimizer is None:
        with torch.no_grad():
            stepper.forward()
        return
    optimizer.zero_grad()
    stepper.backward(stepper.forward(), stepper.planned())
    with recorder.span(OPTIMIZER):
        optimizer.step()


def record_step(trial: Trial, device: str) -> RecordedStep:
    recorder = StepRecorder()
    stepper, executor = parallel_stepper(trial, device, Options(recorder=recorder))
    mark_program(executor.program, recorder)
    recorder.weights = {
        local_part(p).data_ptr(): path for path, p in zip(executor.number, executor.parameters, strict=True)
    }
    trained = stepper.planned() and stepper.parameters
    optimizer = torch.optim.AdamW(stepper.parameters.values(), lr=RATE, eps=EPSILON) if trained else None
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler = _profiler(file.name, device)
        for _ in range(WARM_UP):
            take_step(stepper, optimizer, recorder)
        with profiler:
            take_step(stepper, optimizer, recorder)
            recorder.finish()
            profiler.step()
            executor.count.clear()
            dist.barrier()  # profilers do not take equally long to start
            with recorder.span(STEP):
                take_step(stepper, optimizer, recorder)
                if device == "cuda":
                    torch.cuda.synchronize()
            recorder.finish()
        profile = json.loads(Path(file.name).read_bytes())
    lanes = timeline(profile, recorder.marks, trial.graph, trial.mesh.names)
    return RecordedStep(executor.rank.coord, lanes, Count(executor.count.forward, executor.count.backward))


def _profiler(path: str, device: str) -> torch.profiler.profile:
    on = torch.profiler.ProfilerActivity
    return torch.profiler.profile(
        activities=[on.CPU, on.CUDA] if device == "cuda" else [on.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(path),
        record_shapes=True,
    )
