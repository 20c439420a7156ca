"""What programs take on one GPU, kernel by kernel: what the cost model is held against (benchmarks/measured.py).

    python benchmarks/measure_gpu.py [--models NAME ...] [--ranks | --compile] [--output FILE] [--kernels FILE]

Each model is trained in bfloat16, eager. Of the original: the time of a step that passes, the time that the GPU is busy
with kernels, the most memory that is allocated. Of the program of a plan, the same, for operators and for what the
runtime does to move tensors; `--kernels` writes down each kernel by operator, shapes and pass. Times are of forward and
backward, the optimizer left out; memory is with it. What is measured takes its place in benchmarks/measured_h200.json.

`--ranks`: the program of the first of eight ranks, with collectives that send nothing and values that are real.
`--compile`: the program of one rank under torch.compile; memory is without the optimizer's.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _models import MODELS, on_device

import tapas
from tapas.cost.memory import Optimizer
from tapas.ir.graph import Graph
from tapas.planner.assignment import assignment_of
from tapas.planner.pipeline import tp_hints, within
from tapas.planner.request import Request
from tapas.util import write_file
from tapas.verify.alone import AloneStep, step_alone
from tapas.verify.homes import homes_of
from tapas.verify.subject import capture_subject
from tapas.verify.trial import Trial

CLUSTER = "h200-sxm"
WARM_UP = 3
PASSES, OPTIMIZER = ("forward", "backward"), "optimizer"
FREE = ""
RANKS = [
    *(("llama-1.1b", 64, mesh, pins) for mesh in ("8", "2x4") for pins in ("fsdp", "megatron", "megatron-sp", FREE)),
    *(("bert-large", 256, mesh, pins) for mesh in ("8", "2x4") for pins in ("fsdp", "megatron", "megatron-sp", FREE)),
    ("t5-large-12-layers", 128, "2x4", "megatron"),
    ("mixtral-small", 64, "8", FREE),
    ("vit-h-16-layers", 512, "2x4", "megatron"),
    ("resnet-50", 512, "8", FREE),
]


def repeated(inputs: dict[str, torch.Tensor], batch: int) -> dict[str, torch.Tensor]:
    """The same in a larger batch."""
    return {k: v.repeat(-(-batch // len(v)), *[1] * (v.dim() - 1))[:batch] for k, v in inputs.items()}


def original(name: str, device: str, tiny: bool, rounds: int) -> dict[str, float]:
    """Milliseconds and megabytes of the model as it is."""
    before = settled(device)
    model, inputs = on_device(name, tiny, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def passes() -> None:
        model(**inputs)["loss"].backward()

    seconds: list[float] = []
    for _ in range(WARM_UP + rounds):
        optimizer.zero_grad()
        synchronize(device)
        start = time.perf_counter()
        passes()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        optimizer.step()
    row = {"original_ms": 1e3 * statistics.median(seconds[WARM_UP:])}
    if device == "cuda":
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        passes()
        kept = before + sum(x.nbytes for x in inputs.values())
        row["original_mb"] = (torch.cuda.max_memory_allocated() - kept) / 1e6
        optimizer.zero_grad()
        on = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[on.CUDA]) as profiler:
            passes()
            torch.cuda.synchronize()
        row["original_busy_ms"] = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3
    return row


def settled(device: str) -> int:
    """Bytes that something else still holds."""
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def ours(
    name: str, device: str, tiny: bool, rounds: int, mesh: str = "1", pins: str = FREE, batch: int | None = None
) -> dict[str, Any]:  # fmt: skip
    model, inputs = on_device(name, tiny, device)
    model, inputs = model.cpu(), {k: v.cpu() for k, v in inputs.items()}
    if batch is not None:
        inputs = repeated(inputs, batch)
    before = settled(device)
    subject = capture_subject(model, inputs, True, name)
    request = Request.of(
        mesh, CLUSTER, memory=None, recompute="none", baselines=False, pins={"*": pins} if pins else None,
        optimizer=Optimizer("adam", master=False),  # what AdamW keeps of bfloat16 weights
    )  # fmt: skip
    hints = tp_hints(model)
    found = within(subject.graph, request, hints).best()
    homes = homes_of(subject.model, subject.graph)
    decided = assignment_of(found, request.pieces)
    trial = Trial(subject.graph, subject.folded, request.mesh, decided, subject.leaves(), 1, homes)
    step = step_alone(trial, device, rounds)
    kernels = kernels_of(step, subject.graph)
    return {
        "ms": 1e3 * step.passes, "memory_mb": (step.peak_nbytes - before) / 1e6,
        "operators_ms": sum(row["ms"] for row in kernels if row["phase"] in PASSES),
        "moves_ms": sum(row["ms"] for row in kernels if row["phase"] not in (*PASSES, OPTIMIZER)), "kernels": kernels,
    }  # fmt: skip


def compiled(name: str, device: str, tiny: bool, rounds: int) -> dict[str, float]:
    """Milliseconds and megabytes of the program of one rank, compiled."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    before = settled(device)
    model, inputs = on_device(name, tiny, device)
    parallel = tapas.parallelize(model, inputs, mesh="1", cluster=CLUSTER, memory=None, recompute="none", compile=True)
    del model

    def step() -> float:
        parallel.zero_grad()
        synchronize(device)
        start = time.perf_counter()
        parallel(**inputs)["loss"].backward()
        synchronize(device)
        return time.perf_counter() - start

    seconds = [step() for _ in range(WARM_UP + rounds)][WARM_UP:]
    row = {"ms": 1e3 * statistics.median(seconds)}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        row["memory_mb"] = (torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in inputs.values())) / 1e6
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
        row["busy_ms"] = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3
    dist.destroy_process_group()
    return row


def kernels_of(step: AloneStep, graph: Graph) -> list[dict[str, Any]]:
    """Milliseconds and launches by operator, shapes, pass and kernel."""
    named = {op.name: op for op in graph.ops}
    found = defaultdict[tuple[str, ...], list[float]](lambda: [0.0, 0])
    for span in step.timeline.spans:
        if not span.lane.startswith("stream"):
            continue
        op = named.get(span.details.get("operator", ""))
        shapes, target, phase = "", span.name, "runtime"
        if op is not None:
            shapes = " ".join(f"{graph.tensors[x].dtype}{list(graph.tensors[x].shape)}" for x in op.operands)
            target, phase = op.target, str(span.details["phase"])
            if "move" in span.details or span.category == "runtime":
                phase = f"{phase} move"
        kernel = str(span.details.get("kernel", span.name))
        if op is None and "multi_tensor_apply" in kernel:
            phase = OPTIMIZER
        row = found[target, shapes, phase, kernel]
        row[0] += (span.end - span.start) / 1e6
        row[1] += 1
    columns = ("target", "shapes", "phase", "kernel")
    rows = [dict(zip(columns, key, strict=True)) | {"ms": ms, "launches": n} for key, (ms, n) in found.items()]
    return sorted(rows, key=lambda row: -row["ms"])


def keep(path: Path, part: str, row: dict[str, Any]) -> None:
    """Write a row down, in the place of an earlier one of the same."""
    data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    data["about"] = f"Measured by benchmarks/measure_gpu.py: {device_name()}, torch {torch.__version__}, bfloat16."
    rows = data.setdefault(part, [])
    same = ("model", "batch", "mesh", "pins")
    rows[:] = [other for other in rows if any(other.get(key) != row.get(key) for key in same)] + [row]
    write_file(path, (json.dumps(data, indent=1) + "\n").encode())


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("measured_h200.json"))
    parser.add_argument("--kernels", type=Path)
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    works = [(name, None, "1", FREE) for name in chosen.models]
    if chosen.ranks:
        works = [(name, 16 if chosen.tiny else batch, *how) for name, batch, *how in RANKS if name in chosen.models]
    for name, batch, mesh, pins in works:
        start = time.perf_counter()
        row: dict[str, Any] = {"model": name}
        try:
            if chosen.ranks:
                row |= {"batch": batch, "mesh": mesh, "pins": pins}
            elif not chosen.compile:
                row |= original(name, chosen.device, chosen.tiny, chosen.rounds)
            row |= (
                compiled(name, chosen.device, chosen.tiny, chosen.rounds)
                if chosen.compile
                else ours(name, chosen.device, chosen.tiny, chosen.rounds, mesh, pins, batch)
            )
        except Exception as error:  # the others are measured all the same
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items() if k != "kernels"}
        print(*(f"{k} {v}" for k, v in shown.items()), f"({time.perf_counter() - start:.1f} s)", flush=True)
        if chosen.kernels:
            write_file(chosen.kernels, (json.dumps(rows, indent=1) + "\n").encode())
        if "error" not in row:
            part = "ranks" if chosen.ranks else "compiled" if chosen.compile else "models"
            keep(chosen.output, part, shown)
        if chosen.device == "cuda":
            torch.cuda.empty_cache()
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
