"""Worker processes with a process group among them, started once and used by all tests."""

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKERS = 4
TIMEOUT = 120.0  # seconds for one call, on a busy machine


class Pool:
    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.workers = [], []
        for rank in range(WORKERS):
            here, there = context.Pipe()
            worker = context.Process(target=_serve, args=(rank, str(folder / "store"), there), daemon=True)
            worker.start()
            there.close()
            self.pipes.append(here)
            self.workers.append(worker)

    def __call__(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """`work(rank, *args)` on all workers at once; what each of them returned."""
        for pipe in self.pipes:
            pipe.send((work, args))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT):
                self.close()
                raise TimeoutError(f"worker {rank} hangs in {work.__name__}")
            answers.append(pipe.recv())
        failed = [text for ok, text in answers if not ok]
        if failed:
            self.close()  # the others may be out of step
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.join()


def _serve(rank: int, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORKERS), rank=rank, world_size=WORKERS)
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:  # the tests are over
            return
        try:
            answer = True, work(rank, *args)
        except Exception:
            answer = False, f"worker {rank}: {traceback.format_exc()}"
        pipe.send(answer)
