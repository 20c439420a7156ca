"""What one GPU can say about running plans: overhead of the program, memory and compute time against the prediction.

    python benchmarks/gpu.py

1. One rank: a small Llama trained in bfloat16, the original and the parallel module, eager and compiled: the
   ratio of their step times and the distance of their loss curves.
2. The first of eight ranks, with a process group that sends nothing: peak memory and compute time, beside what
   the plan says, with activations that are kept and computed again.

Ratios are of medians in one run, original and ours in turn. Nothing is claimed about communication.
"""

import argparse
import copy
import statistics
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import tapas

STEPS = 20
CONFIG = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8,
          "num_hidden_layers": 8, "vocab_size": 32000, "use_cache": False}  # fmt: skip
console = Console(width=110)


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.bfloat16)


def tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    x = torch.randint(0, CONFIG["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": x.cuda(), "labels": x.cuda()}


class Training:
    def __init__(self, model: Any, inputs: dict[str, torch.Tensor]) -> None:
        self.model, self.inputs = model, inputs
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.losses: list[float] = []
        self.program: list[float] = []  # seconds of forward and backward
        self.step: list[float] = []  # and of everything

    def __call__(self) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model(**self.inputs)["loss"]
        loss.backward()
        torch.cuda.synchronize()
        self.program.append(time.perf_counter() - start)
        self.optimizer.step()
        torch.cuda.synchronize()
        self.step.append(time.perf_counter() - start)
        self.losses.append(float(loss.detach()))


def median(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds[5:])


def one_rank(batch: int, length: int) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    inputs = tokens(batch, length)
    table = Table(title="One rank, Llama in bfloat16: milliseconds of the original, of ours, and their ratio")
    for heading in ("", "forward and backward", "whole step", "largest difference of losses", "loss"):
        table.add_column(heading)
    for kind in ("eager", "compiled"):
        model = llama().cuda()
        ours = tapas.parallelize(copy.deepcopy(model), inputs, mesh="1", cluster="h200-sxm")
        both = [model, ours]
        if kind == "compiled":
            torch._dynamo.reset()
            both = [torch.compile(m) for m in both]
        one, two = (Training(m, inputs) for m in both)
        for _ in range(STEPS):
            one()
            two()
        cells = []
        for a, b in ((one.program, two.program), (one.step, two.step)):
            cells.append(f"{median(a):.2f}  {median(b):.2f}  {median(b) / median(a):.3f}")
        distance = max(abs(a - b) for a, b in zip(one.losses, two.losses, strict=True))
        table.add_row(kind, *cells, f"{distance:.2g}", f"{one.losses[0]:.3f} to {one.losses[-1]:.3f}")
        del model, ours, both, one, two
        torch.cuda.empty_cache()
    console.print(table)
    dist.destroy_process_group()


def first_of_many(mesh: str, batch: int, length: int, recompute: str) -> tuple[str, ...]:
    """Peak memory and compute time of the first rank, measured and planned."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    from tapas.cost.memory import Optimizer

    sizes = tuple(map(int, mesh.split("x")))
    ranks = torch.Size(sizes).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    inputs = tokens(batch, length)
    model = llama()
    plan = tapas.plan(
        model, inputs, mesh=sizes, cluster="h200-sxm", baselines=False, recompute=recompute,
        optimizer=Optimizer("adam", master=False),  # what AdamW keeps of bfloat16 weights
    )  # fmt: skip
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    module = tapas.parallelize(model, inputs, mesh=sizes, plan=plan)
    training = Training(module, inputs)
    training()
    training.program.clear()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        training()
    peak, compute = torch.cuda.max_memory_allocated() - base, median(training.program) / 1e3
    planned = sum(plan.memory.values())
    seconds = plan.seconds["compute"] - plan.seconds["update"]
    del training, module
    dist.destroy_process_group()
    return (
        mesh, recompute, f"{peak / 1e6:.0f} MB", f"{planned / 1e6:.0f} MB", f"{planned / peak:.2f}",
        f"{1e3 * compute:.1f} ms", f"{1e3 * seconds:.1f} ms", f"{seconds / compute:.2f}",
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    warnings.simplefilter("ignore")
    import transformers

    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    one_rank(chosen.batch, chosen.length)
    table = Table(title=f"Rank 0 of eight, batch {8 * chosen.batch}, {chosen.length} tokens: nothing is really sent")
    for heading in ("mesh", "recompute", "peak", "planned", "ratio", "forward and backward", "planned", "ratio"):
        table.add_column(heading)
    for mesh in ("8", "2x4"):
        for recompute in ("none", "selective", "block"):
            table.add_row(*first_of_many(mesh, 8 * chosen.batch, chosen.length, recompute))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
