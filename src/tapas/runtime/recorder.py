"""Tells torch's profiler what a rank is doing: which operator of the plan runs, and what is sent.

A program that nobody records knows nothing of this: what is here stands around the axes, groups and operators of one
that is recorded. The profiler is told a number; what it stands for is kept here.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tapas._torch import in_backward, profiled_span, profiled_until
from tapas.plan.lanes import AHEAD, BEHIND, MOVES
from tapas.runtime.collectives import Axes, Axis, Count, Members, Passing, Side

NAME = "tapas mark "  # before the number of a mark, among the profiler's names


@dataclass(frozen=True)
class CopyMark:
    """A call of a block."""

    first: int  # the number of its first operator


@dataclass(frozen=True)
class OperatorMark:
    number: int  # among the operators of its block


@dataclass(frozen=True)
class MoveMark:
    """A move of an operand, of which a part may be sent."""

    number: int  # of the operator that reads it, among those of its block
    text: str


@dataclass(frozen=True)
class SentMark:
    """A collective from where it is launched."""

    role: str  # MOVES, AHEAD or BEHIND
    phase: str  # as it is counted
    kind: str
    axes: Axes
    nbytes: int = 0  # a move over several axes is several collectives, of which the first one has them all
    backward: bool = False  # during the backward pass
    weights: tuple[str, ...] = ()  # that are gathered
    shapes: tuple[tuple[int, ...], ...] = ()  # of what this rank gives, of each of the tensors that travel together
    timed: bool = False  # the profiler's span ends when the collective does


@dataclass(frozen=True)
class PhaseMark:
    """The whole step, the optimizer's part of it, or a wait."""

    name: str


STEP, OPTIMIZER, WAIT = PhaseMark("step"), PhaseMark("optimizer"), PhaseMark("wait")
Mark = CopyMark | OperatorMark | MoveMark | SentMark | PhaseMark


class _CountedFirst(Count):
    """What is counted is about to be sent."""

    def __init__(self, recorder: "StepRecorder") -> None:
        super().__init__()
        self.recorder = recorder

    def add(self, phase: str, kind: str, axes: tuple[int, ...], nbytes: int) -> None:
        super().add(phase, kind, axes, nbytes)
        self.recorder.next = SentMark("", phase, kind, axes, nbytes)


class StepRecorder:
    """What is marked on one rank, by number."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.numbers: dict[Mark, int] = {}
        self.count: Count = _CountedFirst(self)
        self.next = SentMark("", "forward", "", ())
        self.unfinished: list[Any] = []  # futures, of which the profiler has to hear the end

    def axes(self, axes: Sequence[Axis]) -> list[Axis]:
        return [RecordedAxis(axis, self) for axis in axes]

    def side(self, side: Side, moves: bool = False) -> Side:
        """`moves`: of activations."""
        return RecordedSide(side, self, moves)

    def _number(self, mark: Mark) -> int:
        if mark not in self.numbers:
            self.numbers[mark] = len(self.marks)
            self.marks.append(mark)
        return self.numbers[mark]

    def span(self, mark: Mark) -> AbstractContextManager[Any]:
        return profiled_span(f"{NAME}{self._number(mark)}")

    def sent(self, role: str, tensors: Sequence[torch.Tensor], of: Members = ()) -> SentMark:
        """What is launched now; `tensors` travel together."""
        mark, self.next = self.next, replace(self.next, nbytes=0)
        weights = () if isinstance(of, Passing) else tuple(path for path in of if isinstance(path, str))
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        return replace(mark, role=role, backward=in_backward(), weights=weights, shapes=shapes)

    def launched(self, launch: Callable[[], Any], mark: SentMark, device: torch.device) -> Any:
        """Something beside the computation. On CPUs its end is seen where it can be; streams have ends of their own."""
        if device.type != "cpu":
            with self.span(mark):
                return RecordedWork(launch(), self)
        number = self._number(replace(mark, timed=True))
        work, future = profiled_until(f"{NAME}{number}", launch)
        if future is None:
            self.marks[number] = mark
        else:
            self.unfinished.append(future)
        return RecordedWork(work, self)

    def finish(self) -> None:
        """Let the profiler hear the end of all that was launched."""
        for future in self.unfinished:
            future.wait()
        self.unfinished.clear()


class RecordedWork:
    def __init__(self, work: Any, recorder: StepRecorder) -> None:
        self.work, self.recorder = work, recorder

    def wait(self) -> None:
        with self.recorder.span(WAIT):
            self.work.wait()


class RecordedAxis:
    """An axis whose collectives are waited for."""

    def __init__(self, axis: Axis, recorder: StepRecorder) -> None:
        self.axis, self.recorder, self.size, self.index = axis, recorder, axis.size, axis.index

    def _span(self, x: torch.Tensor) -> AbstractContextManager[Any]:
        return self.recorder.span(self.recorder.sent(MOVES, [x]))

    def all_reduce(self, x: torch.Tensor, how: str = "sum") -> torch.Tensor:
        with self._span(x):
            return self.axis.all_reduce(x, how)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        with self._span(x):
            return self.axis.all_gather(x)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        with self._span(x):
            return self.axis.reduce_scatter(x)

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        with self._span(x):
            return self.axis.all_to_all(x, sent, received)

    def pass_on(self, parts: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> Any:
        mark = replace(self.recorder.sent(MOVES, parts), nbytes=sum(part.nbytes for part in parts))
        with self.recorder.span(mark):
            return RecordedWork(self.axis.pass_on(parts, arriving), self.recorder)


class RecordedSide:
    def __init__(self, side: Side, recorder: StepRecorder, moves: bool) -> None:
        self.side, self.recorder, self.joint = side, recorder, side.joint
        self.ahead, self.behind = (MOVES, MOVES) if moves else (AHEAD, BEHIND)

    def add(self, kind: str, axes: Axes) -> None:
        self.side.add(kind, axes)

    def sum(self, axes: Axes, tensors: Sequence[torch.Tensor], of: Members) -> Any:
        mark = self.recorder.sent(self.behind, tensors)
        return self.recorder.launched(lambda: self.side.sum(axes, tensors, of), mark, tensors[0].device)

    def gather(self, axes: Axes, wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], of: Members) -> Any:
        mark = self.recorder.sent(self.ahead, parts, of)
        return self.recorder.launched(lambda: self.side.gather(axes, wholes, parts, of), mark, wholes[0].device)

    def scatter(self, axes: Axes, parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], of: Members) -> Any:
        mark = self.recorder.sent(self.behind, wholes)
        return self.recorder.launched(lambda: self.side.scatter(axes, parts, wholes, of), mark, wholes[0].device)


class Marked(nn.Module):
    """A call within a program, marked: each time with the next of some marks."""

    def __init__(self, function: Callable[..., Any], recorder: StepRecorder, marks: Sequence[Mark]) -> None:
        super().__init__()
        self.function, self.recorder, self.marks, self.calls = function, recorder, tuple(marks), 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mark = self.marks[self.calls % len(self.marks)]
        self.calls += 1
        with self.recorder.span(mark):
            return self.function(*args, **kwargs)
