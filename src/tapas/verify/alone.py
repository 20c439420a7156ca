"""Rank 0's program without the other ranks: real values, and collectives that send nothing.

What would arrive is made of what is there: shapes and copies are those of the real program, sums and losses are not.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tapas._torch import silent_group
from tapas.runtime.collectives import Axis, Done, Side
from tapas.runtime.recorder import RecordedAxis, RecordedSide, RecordedWork, SentMark, StepRecorder
from tapas.runtime.side_groups import SideAxes
from tapas.verify.recorded_step import MarkedStep
from tapas.verify.steps import Allocated
from tapas.verify.timeline import Timeline
from tapas.verify.trial import Trial


class SilentAxis:
    """An axis along which nobody else is."""

    index = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: torch.Tensor, how: str = "sum") -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.size)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x[: len(x) // self.size].clone()

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        wanted = sum(received)
        if not len(x):  # who has no neighbour there sends nothing, and gets something
            return x.new_zeros((wanted, *x.shape[1:]))
        return torch.cat([x] * -(-wanted // len(x)))[:wanted]

    def pass_on(self, parts: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> Done:
        for part, whole in zip(parts, arriving, strict=True):
            whole.copy_(part)
        return Done()


class SilentRecorder(StepRecorder):
    """Records a step in which nothing is sent."""

    def __init__(self, mesh: tuple[int, ...]) -> None:
        super().__init__()
        self.silent: list[Axis] = [SilentAxis(size) for size in mesh]

    def axes(self, axes: object) -> list[Axis]:
        return [RecordedAxis(axis, self) for axis in self.silent]

    def side(self, side: object, moves: bool = False) -> Side:
        return RecordedSide(SideAxes(self.silent), self, True)

    def launched(self, launch: Callable[[], Any], mark: SentMark, device: torch.device) -> Any:
        """Where it is launched it has arrived."""
        with self.span(mark):
            return RecordedWork(launch(), self)


@dataclass(frozen=True)
class AloneStep:
    """What was measured of rank 0."""

    timeline: Timeline  # of one step, under the profiler
    passes: float  # seconds of forward and backward, without it
    update: float  # of the optimizer's step
    peak_nbytes: int


def step_alone(trial: Trial, device: str, rounds: int) -> AloneStep:
    with silent_group(trial.mesh.devices):
        step = MarkedStep.of(trial, device, SilentRecorder(trial.mesh.sizes))
        lanes = step.record()
        passes, updates = zip(*(_timed(step) for _ in range(rounds)), strict=True)
        return AloneStep(lanes, statistics.median(passes), statistics.median(updates), _peak_nbytes(step))


def _timed(step: MarkedStep) -> tuple[float, float]:
    """Seconds of forward and backward, and of the optimizer's step."""
    start = _now(step.device)
    _passes(step)
    middle = _now(step.device)
    if step.optimizer is not None:
        step.optimizer.step()
    return middle - start, _now(step.device) - middle


def _passes(step: MarkedStep) -> None:
    if step.optimizer is None:
        return step.take()
    step.optimizer.zero_grad()
    step.stepper.backward(step.stepper.forward(), step.stepper.planned())


def _peak_nbytes(step: MarkedStep) -> int:
    """As torch's allocator counts it, or where there is none, of storages that are alive; inputs are the caller's."""
    stepper = step.stepper
    if step.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        _passes(step)
        return torch.cuda.max_memory_allocated() - sum(x.untyped_storage().nbytes() for x in stepper.inputs)
    states = step.optimizer.state.values() if step.optimizer is not None else []
    state = [value for kept in states for value in kept.values() if torch.is_tensor(value)]
    with Allocated((*stepper.held, *stepper.parameters.values(), *state), stepper.inputs) as memory:
        _passes(step)
    return memory.peak


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
