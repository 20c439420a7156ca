"""How long something takes on a device, repeated until the figure is worth something."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Work = Callable[[], Any]


@dataclass(frozen=True)
class Stopwatch:
    """On a GPU, many calls are queued and the device's own clock is read, so that the host does not count."""

    device: torch.device
    rounds: int = 7
    agree: Callable[[float], float] = float  # on how often: what is timed may wait for the same on other ranks
    round_seconds: float = 0.01

    def __call__(self, work: Work) -> float:
        """Seconds of a call: the lower quartile over rounds, for what else happens only ever takes longer."""
        self._round(work, 2)  # what is only done once
        times = max(1, min(1000, round(self.agree(self.round_seconds / max(self._round(work, 1), 1e-7)))))
        return statistics.quantiles([self._round(work, times) / times for _ in range(self.rounds)], n=4)[0]

    def _round(self, work: Work, times: int) -> float:
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self.device)
            start.record()
            for _ in range(times):
                work()
            end.record()
            torch.cuda.synchronize(self.device)
            return start.elapsed_time(end) / 1e3
        begin = time.perf_counter()
        for _ in range(times):
            work()
        return time.perf_counter() - begin


def both_passes(module: torch.nn.Module, watch: Stopwatch) -> tuple[float, float]:
    """Forward and backward."""
    operands = list(module.parameters())
    result = module()
    gradient = torch.ones_like(result)
    ahead = watch(module)
    return ahead, watch(lambda: torch.autograd.grad(result, operands, gradient, retain_graph=True))
