"""Ranks as threads of this process, with process groups among them: what users call runs as it is.

torch's own tests bring a backend for that. Nothing leaves the process, so a step of a small module takes milliseconds.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed import multi_threaded_pg as threaded

SECONDS = 60.0  # for one call: whoever takes longer waits for a rank that is gone
GRACE = 1.0  # for the others when one has failed
POLL = 0.05
# DTensor advises larger collectives than a test needs; what fails with fake tensors is in the verdict
LOUD = ("torch.distributed.tensor", "torch.distributed.tensor._redistribute", "torch._subclasses.fake_tensor")

Work = Callable[[DeviceMesh], Any]


class Rank(threading.Thread):
    """One rank: waits for work, and keeps its process groups from one work to the next."""

    def __init__(self, rank: int, mesh: tuple[int, ...], store: dist.Store, together: "Together") -> None:
        super().__init__(daemon=True, name=f"rank{rank}")
        self.rank, self.shape, self.store, self.together = rank, mesh, store, together
        self.device_mesh: DeviceMesh | None = None
        self.work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run(self) -> None:
        torch.set_num_threads(1)
        while (work := self.work.get()) is not None:
            try:
                self.answers.put((work(self.device_mesh or self.meet()), None))
            except BaseException as error:  # whatever it is, the caller hears of it
                self.answers.put((None, error))

    def meet(self) -> DeviceMesh:
        size, timeout = prod(self.shape), timedelta(seconds=SECONDS)
        dist.init_process_group("threaded", rank=self.rank, world_size=size, store=self.store, timeout=timeout)
        self.device_mesh = DeviceMesh("cpu", torch.arange(size).reshape(self.shape))
        return self.device_mesh


class Together:
    """What one rank does for all of them, while the others wait."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=SECONDS / 2)
        self.answer: tuple[Any, Exception | None] = None, None

    def __call__(self, work: Callable[[], Any]) -> Any:
        if self.barrier.wait() == 0:
            try:
                self.answer = work(), None
            except Exception as error:  # everybody's
                self.answer = None, error
        self.barrier.wait()
        answer, error = self.answer
        self.barrier.wait()
        if error is not None:
            raise error
        return answer


class Ranks:
    """All ranks of a mesh. Where only some of them fail they are out of step: the next call has new ones."""

    def __init__(self, mesh: tuple[int, ...]) -> None:
        self.mesh = mesh
        self.threads: list[Rank] = []
        self.replaced: list[Rank] = []

    def __call__(self, work: Work) -> list[Any]:
        """`work(device_mesh)` on all ranks; the first error of any of them is raised."""
        threaded.ProcessLocalGroup.reset()
        if not self.threads:
            store = dist.HashStore()
            together = Together(prod(self.mesh))
            self.threads = [Rank(rank, self.mesh, store, together) for rank in range(prod(self.mesh))]
            for thread in self.threads:
                thread.start()
        for thread in self.threads:
            thread.work.put(work)
        answers = self._answers()
        errors = [error for _, error in answers if error is not None]
        if errors:
            alike = len(errors) == len(answers) and len({str(error) for error in errors}) == 1
            if not alike or isinstance(errors[0], TimeoutError):
                self.replace()
            own = [error for error in errors if not isinstance(error, SystemExit)]  # others were only told to stop
            raise next((e for e in own if not isinstance(e, TimeoutError)), (own or errors)[0])
        return [answer for answer, _ in answers]

    def _answers(self) -> list[tuple[Any, BaseException | None]]:
        found: dict[int, tuple[Any, BaseException | None]] = {}
        end = monotonic() + SECONDS
        while len(found) < len(self.threads):
            for rank, thread in enumerate(self.threads):
                if rank not in found:
                    try:
                        found[rank] = thread.answers.get(timeout=POLL)
                    except queue.Empty:
                        continue
                    if found[rank][1] is not None:
                        end = min(end, monotonic() + GRACE)
            if monotonic() > end:
                late = [rank for rank in range(len(self.threads)) if rank not in found]
                error = TimeoutError(f"ranks {late} of {self.mesh} wait for ever")
                threaded.ProcessLocalGroup.exception_handle(error)  # those that wait for others stop
                found |= dict.fromkeys(late, (None, error))
        return [found[rank] for rank in range(len(self.threads))]

    def replace(self) -> None:
        """Threads are never ended: a new one would get the number of one that is gone, and by these numbers torch
        tells apart the meshes of different ranks."""
        self.replaced += self.threads
        self.threads = []


_RANKS: dict[tuple[int, ...], Ranks] = {}  # by mesh: they serve all tests of this process


def _ranks_of(mesh: tuple[int, ...]) -> Ranks:
    return _RANKS.setdefault(mesh, Ranks(mesh))


@contextmanager
def thread_groups() -> Iterator[Callable[[tuple[int, ...]], Ranks]]:
    """While active, process groups are those of threads."""
    logs = [logging.getLogger(name) for name in LOUD]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    _set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        yield _ranks_of
    finally:
        threaded._uninstall_threaded_pg()
        _set_thread_isolation_mode(False)
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
