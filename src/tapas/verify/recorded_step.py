"""A step that is recorded, on one rank.

The program is the one that users run, in the model's own precision, with the dropout that verification leaves out.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tapas.runtime.collectives import Count
from tapas.runtime.executor import Executor, Options
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


@dataclass(frozen=True)
class MarkedStep:
    """A rank's program, ready to be recorded."""

    trial: Trial
    device: str
    recorder: StepRecorder
    stepper: Stepper
    executor: Executor
    optimizer: torch.optim.Optimizer | None

    @classmethod
    def of(cls, trial: Trial, device: str, recorder: StepRecorder) -> "MarkedStep":
        stepper, executor = parallel_stepper(trial, device, Options(recorder=recorder))
        mark_program(executor.program, recorder)
        trained = stepper.planned() and stepper.parameters
        optimizer = torch.optim.AdamW(stepper.parameters.values(), lr=RATE, eps=EPSILON) if trained else None
        return cls(trial, device, recorder, stepper, executor, optimizer)

    def take(self) -> None:
        take_step(self.stepper, self.optimizer, self.recorder)

    def record(self) -> Timeline:
        recorder = self.recorder
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiler = _profiler(file.name, self.device)
            for _ in range(WARM_UP):
                self.take()
            with profiler:
                self.take()
                recorder.finish()
                profiler.step()
                self.executor.count.clear()
                dist.barrier()  # profilers do not take equally long to start
                with recorder.span(STEP):
                    self.take()
                    if self.device == "cuda":
                        torch.cuda.synchronize()
                recorder.finish()
            profile = json.loads(Path(file.name).read_bytes())
        return timeline(profile, recorder.marks, self.trial.graph, self.trial.mesh.names)


def record_step(trial: Trial, device: str) -> RecordedStep:
    step = MarkedStep.of(trial, device, StepRecorder())
    lanes, count = step.record(), step.executor.count
    return RecordedStep(step.executor.rank.coord, lanes, Count(count.forward, count.backward))


def _profiler(path: str, device: str) -> torch.profiler.profile:
    on = torch.profiler.ProfilerActivity
    return torch.profiler.profile(
        activities=[on.CPU, on.CUDA] if device == "cuda" else [on.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(path),
        record_shapes=True,
    )
