"""How long something takes on a device, repeated until the figure is worth something."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Work = Callable[[], Any]
QUEUED = 40  # calls of some kernels each: what a GPU's queue takes before the host has to wait
HOST_SECONDS = 5e-4  # at most, to queue one of them
PRODUCT, PRODUCT_SECONDS = 4096, 1e-4  # a product of matrices of that size takes at least so long on any GPU of today


@dataclass(frozen=True)
class Stopwatch:
    """On a GPU the device's own clock is read, while it works off what was queued before: the host does not count."""

    device: torch.device
    rounds: int = 7
    agree: Callable[[float], float] = float  # on how often: what is timed may wait for the same on other ranks
    round_seconds: float = 0.01

    def __call__(self, work: Work) -> float:
        """Seconds of a call: the lower quartile over rounds, for what else happens only ever takes longer."""
        self._round(work, 2)  # what is only done once
        most = QUEUED if self.device.type == "cuda" else 1000
        times = max(1, min(most, round(self.agree(self.round_seconds / max(self._round(work, 1), 1e-7)))))
        return statistics.quantiles([self._round(work, times) / times for _ in range(self.rounds)], n=4)[0]

    def _round(self, work: Work, times: int) -> float:
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self.device)
            _occupy(self.device, times * HOST_SECONDS)
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


def _occupy(device: torch.device, seconds: float) -> None:
    """Give a GPU something to do for so long, at least."""
    x = torch.empty(PRODUCT, PRODUCT, dtype=torch.bfloat16, device=device)
    for _ in range(math.ceil(seconds / PRODUCT_SECONDS)):
        torch.mm(x, x)
