"""All ranks of a program in one process, a thread each: the same program without process groups."""

import threading
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch


class _Meeting:
    """Where the ranks along one axis exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.slots = size, threading.Barrier(size), [None] * size

    def exchange(self, index: int, item: Any) -> list[Any]:
        self.slots[index] = item
        self.barrier.wait(60)
        found = list(self.slots)
        self.barrier.wait(60)
        return found


class ThreadAxis:
    def __init__(self, meeting: _Meeting, index: int) -> None:
        self.meeting, self.size, self.index = meeting, meeting.size, index

    def all_reduce(self, x: torch.Tensor, how: str = "sum") -> torch.Tensor:
        stacked = torch.stack(self.meeting.exchange(self.index, x.detach()))
        return stacked.sum(0).to(x.dtype) if how == "sum" else stacked.amax(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.index, x.detach()))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.meeting.exchange(self.index, x.detach())
        return torch.stack([p.chunk(self.size)[self.index] for p in parts]).sum(0).to(x.dtype)

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        found = self.meeting.exchange(self.index, x.detach().split(sent))
        return torch.cat([parts[self.index] for parts in found])


def thread_axes(mesh: Sequence[int]) -> dict[tuple[int, ...], list[ThreadAxis]]:
    """For each coordinate of a mesh, its axes."""
    meetings: dict[tuple, _Meeting] = {}
    found = {}
    for coord in product(*(range(n) for n in mesh)):
        axes = []
        for a, n in enumerate(mesh):
            key = (a, *coord[:a], None, *coord[a + 1 :])
            axes.append(ThreadAxis(meetings.setdefault(key, _Meeting(n)), coord[a]))
        found[coord] = axes
    return found


def run_threads(work: Callable[[tuple[int, ...]], Any], coords: Sequence[tuple[int, ...]], axes: dict) -> dict:
    """Run `work(coord)` for all coordinates at once; the first error ends all of them."""
    results: dict[tuple[int, ...], Any] = {}
    errors: list[tuple[tuple[int, ...], BaseException]] = []

    def one(coord: tuple[int, ...]) -> None:
        try:
            results[coord] = work(coord)
        except BaseException as error:  # whatever it is, the others must not wait for this rank
            errors.append((coord, error))
            for wires in axes.values():
                for axis in wires:
                    axis.meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(coord,)) for coord in coords]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in errors if not isinstance(e[1], threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0][1]
    return results
