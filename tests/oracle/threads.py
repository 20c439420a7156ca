"""Ranks as threads: a Comm whose collectives are a barrier and a shared list, and counts its bytes."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tapas.errors import TapasError
from tapas.runtime.collectives import Done
from tapas.runtime.numbered import register

Coord = tuple[int, ...]


class Meeting:
    """Where the ranks of one group put their tensors and read those of the others."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def exchange(self, index: int, value: Any) -> list[Any]:
        self.slots[index] = value.detach() if isinstance(value, torch.Tensor) else value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


class ThreadComm:
    """The Comm of one rank along one axis; `sent` counts payload bytes, forward and backward."""

    def __init__(self, meeting: Meeting, size: int, index: int) -> None:
        self.meeting, self.size, self.index = meeting, size, index
        self.sent = {"forward": 0, "backward": 0}
        self.number = register(self)

    def reduce(self, x: torch.Tensor, way: str) -> torch.Tensor:
        self.sent[way] += x.numel() * x.element_size()
        return torch.stack(self.meeting.exchange(self.index, x)).sum(0)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(x, self)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        return _Copy.apply(x, self)

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        self.sent["forward"] += x.numel() * x.element_size()
        return torch.stack(self.meeting.exchange(self.index, x)).amax(0)

    largest = maximum

    def pass_on(self, parts: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], phase: str) -> Done:
        self.sent[phase] += sum(x.numel() * x.element_size() for x in parts)
        for number, whole in enumerate(arriving):
            whole.copy_(self.meeting.exchange(self.index, parts[number])[self.index - 1])
        return Done()

    def exchange(self, x: torch.Tensor, sent: list[int], received: list[int], back: bool = False) -> torch.Tensor:
        return _Exchange.apply(x, self, sent, received, back)

    def checked(self, x: torch.Tensor, wrong: torch.Tensor, fact: str, remedy: str) -> torch.Tensor:
        if bool(wrong):
            raise TapasError(f"rank {self.index}", fact, remedy)
        return x

    def borders(self, x: torch.Tensor, sent: list[int], received: list[int], kept: bool) -> torch.Tensor:
        assert sum(n > 0 for n in sent) <= 2
        return _Exchange.apply(x, self, sent, received, False)

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int], way: str, back: bool) -> torch.Tensor:
        every = self.meeting.exchange(self.index, x.detach().clone().split(sent))
        y = torch.cat([parts[self.index] for parts in every])
        assert [len(parts[self.index]) for parts in every] == received
        self.sent[way] += (y if back else x).nbytes
        return y


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        return comm.reduce(x, "forward")

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, sent, received, back):
        ctx.comm, ctx.sizes, ctx.back = comm, (received, sent), back
        return comm.all_to_all(x, sent, received, "forward", back)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.comm.all_to_all(gradient, *ctx.sizes, "backward", not ctx.back), None, None, None, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.comm.reduce(gradient, "backward"), None


def comms_of(mesh: Sequence[int], coords: Sequence[Coord]) -> dict[Coord, dict[int, ThreadComm]]:
    """For every rank, its Comm along every axis."""
    meetings: dict[tuple[int, Coord], Meeting] = {}

    def comm(axis: int, coord: Coord) -> ThreadComm:
        others = coord[:axis] + coord[axis + 1 :]
        meeting = meetings.setdefault((axis, others), Meeting(mesh[axis]))
        return ThreadComm(meeting, mesh[axis], coord[axis])

    return {coord: {axis: comm(axis, coord) for axis in range(len(mesh))} for coord in coords}


def run_ranks(
    coords: Sequence[Coord], comms: dict[Coord, dict[int, ThreadComm]], work: Callable[[Coord], Any]
) -> dict[Coord, Any]:
    """Run every rank's work in a thread of its own; the first failure is raised, the others are released."""
    done: dict[Coord, Any] = {}
    failed: list[BaseException] = []

    def body(coord: Coord) -> None:
        try:
            done[coord] = work(coord)
        except BaseException as error:  # handed to the caller below
            if not isinstance(error, threading.BrokenBarrierError):
                failed.insert(0, error)
            failed.append(error)
            for comm in (c for by_axis in comms.values() for c in by_axis.values()):
                comm.meeting.barrier.abort()

    threads = [threading.Thread(target=body, args=(coord,)) for coord in coords]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return done
