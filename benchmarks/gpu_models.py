"""One rank of the parallel program against the original, on a GPU, for models of many kinds.

    python benchmarks/gpu_models.py [--models NAME ...] [--rounds N] [--compile [--mode MODE]] [--device cpu --tiny]

Each model is trained in bfloat16, the original and ours in turn: forward and backward, and the whole step with fused
AdamW (ours by `tapas.local_optimizer`). A ratio is the median over the rounds, with the 95 % interval of that median.
`--tiny` is for trying this file out where there is no GPU: its ratios are those of overheads, not of models.
Wanted: at most 1.02 forward and backward, 1.03 with the optimizer, 1.02 compiled.
"""

import argparse
import copy
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from _models import MODELS, Config, on_device
from _timing import interval
from rich.console import Console
from rich.table import Table

import tapas

WARM_UP = 3


class Training:
    def __init__(self, model: Any, inputs: Config, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.inputs, self.optimizer = model, inputs, optimizer
        self.cuda = next(iter(inputs.values())).is_cuda
        self.program: list[float] = []
        self.step: list[float] = []
        self.loss = 0.0

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        start = self.now()
        loss = self.model(**self.inputs)["loss"]
        loss.backward()
        self.program.append(self.now() - start)
        self.optimizer.step()
        self.step.append(self.now() - start)
        self.loss = float(loss.detach())


def measured(name: str, device: torch.device, tiny: bool, rounds: int, compiled: str) -> tuple[str, ...]:
    model, inputs = on_device(name, tiny, str(device))
    ours = tapas.parallelize(copy.deepcopy(model), inputs, mesh="1", cluster="h200-sxm")
    optimizers = (
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        tapas.local_optimizer(torch.optim.AdamW, ours.parameters(), lr=1e-4, fused=True),
    )
    both = [torch.compile(m, mode=compiled) if compiled else m for m in (model, ours)]
    original, rewritten = (Training(m, inputs, o) for m, o in zip(both, optimizers, strict=True))
    for number in range(WARM_UP + rounds):
        for one in (original, rewritten) if number % 2 else (rewritten, original):
            one()
    cells = []
    for theirs, mine in ((original.program, rewritten.program), (original.step, rewritten.step)):
        theirs, mine = theirs[WARM_UP:], mine[WARM_UP:]
        ratio, low, high = interval([a / b for a, b in zip(mine, theirs, strict=True)])
        cells += [f"{1e3 * sorted(theirs)[len(theirs) // 2]:.2f}", f"{ratio:.3f} ({low:.3f} to {high:.3f})"]
    return name, *cells, f"{original.loss:.3f}, {rewritten.loss:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--mode", default="default", help="of torch.compile: reduce-overhead takes CUDA graphs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    warnings.simplefilter("ignore")
    console, device = Console(width=120), torch.device(chosen.device)
    backend = "nccl" if chosen.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    table = Table(title=f"One rank against the original{f', compiled ({chosen.mode})' if chosen.compile else ''}")
    for heading in ("", "forward and backward, ms", "ours", "whole step, ms", "ours", "loss of both"):
        table.add_column(heading)
    for name in chosen.models:
        try:
            row = measured(name, device, chosen.tiny, chosen.rounds, chosen.mode if chosen.compile else "")
        except torch.OutOfMemoryError:
            row = (name, "does not fit")
        table.add_row(*row)
        print(*row, flush=True)  # a run that is cut off has said what it knew
        if chosen.device == "cuda":
            torch.cuda.empty_cache()
    console.print(table)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
