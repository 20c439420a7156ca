"""Worker processes with a process group among them, started once and used by all tests."""

import multiprocessing
import traceback
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

WORKERS = 4
# Imported once, by the server that workers are forked from: this takes longer than what most tests do.
IMPORTED = [
    "tapas.api", "tests.distributed.test_checkpoints", "tests.distributed.test_loop", "torch._dynamo",
    "torch._inductor.compile_fx", "torch.distributed.tensor.experimental", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]  # fmt: skip
TIMEOUT = 240.0  # seconds for one call, on a busy machine


class Pool:
    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, 0
        self.pipes: list[Connection] = []
        self.workers: list[Any] = []

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        store = self.folder / f"store{self.started}"
        self.started += 1
        for rank in range(WORKERS):
            here, there = context.Pipe()
            worker = context.Process(target=_serve, args=(rank, str(store), there), daemon=True)
            worker.start()
            there.close()
            self.pipes.append(here)
            self.workers.append(worker)

    def __call__(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """`work(rank, *args)` on all workers at once; what each of them returned."""
        if not self.workers:
            self.start()
        try:
            for pipe in self.pipes:
                pipe.send((work, args))
            answers = self._answers(work.__name__)
        except BaseException:
            self.close()  # the workers may be out of step: the next test gets new ones
            raise
        return [answers[rank] for rank in range(WORKERS)]

    def _answers(self, work: str) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        end = monotonic() + TIMEOUT
        while waiting := {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}:
            ready = wait(list(waiting), end - monotonic())
            if not ready:
                raise TimeoutError(f"workers {sorted(waiting.values())} hang in {work}")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    well, answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self.workers[rank].join()
                    raise AssertionError(f"worker {rank} died in {work}: {self.workers[rank].exitcode}") from None
                if not well:
                    raise AssertionError(answers[rank])
        return answers

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.join()
        self.pipes, self.workers = [], []


def _serve(rank: int, store: str, pipe: Any) -> None:
    import faulthandler

    import torch
    import torch.distributed as dist

    faulthandler.enable()  # a worker that crashes says where
    torch.set_num_threads(1)
    for number in count():
        try:
            work, args = pipe.recv()
        except EOFError:  # the tests are over
            return
        # Groups of their own for every call: each has threads that never sleep, and the meshes of all tests are many.
        made = dist.FileStore(f"{store}.{number}", WORKERS)
        dist.init_process_group("gloo", store=made, rank=rank, world_size=WORKERS)
        try:
            answer = True, work(rank, *args)
        except Exception:
            answer = False, f"worker {rank}: {traceback.format_exc()}"
        pipe.send(answer)
        dist.barrier()  # others may not have got beyond the start
        dist.destroy_process_group()
