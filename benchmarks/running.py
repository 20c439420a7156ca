"""Step time of our plan beside DDP, FSDP2 and transformers' tp_plan, on two local ranks; overhead at one rank.

    python benchmarks/running.py [--rounds N] [--against SRC]

`--against` the `src` folder of another checkout measures, instead of all that, what `parallelize` and a step take with
either code: processor time of a rank of two, in processes that are started in turn.

All four train the same small Llama on the same global batch over gloo, in turn in the same processes, so that
what else the machine does hits them alike; ratios are of medians. The plan is made for the link between two
local processes as measured at the start. Exit code 1 if ours is slower than the best of the others, or if the
rewritten program at one rank takes more than 1.05 times the original model.
"""

import argparse
import copy
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

CONFIG = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 4,
          "num_hidden_layers": 4, "vocab_size": 4000, "use_cache": False}  # fmt: skip
BATCH, LENGTH = 8, 128
SLACK = 1.02  # what two medians of the same thing differ by here
OVERHEAD = 1.05


def llama(**more: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, **more))


def tokens() -> dict[str, torch.Tensor]:
    x = torch.randint(0, CONFIG["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": x, "labels": x}


def mine(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of the batch."""
    each = BATCH // dist.get_world_size()
    return {k: v[dist.get_rank() * each : (dist.get_rank() + 1) * each] for k, v in inputs.items()}


def measured_cluster() -> Any:
    """The preset for local processes, with this machine's link and speed."""
    from tapas.hardware.cluster import Link
    from tapas.hardware.cluster_files import load_cluster

    def seconds(work: Callable[[], Any], times: int) -> float:
        """At its best: what else the machine does is not the link."""
        found = []
        for _ in range(times):
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
        return min(found)

    def meeting() -> float:
        """What it costs to wait for each other in the middle of work: nobody arrives at the same time."""
        found = []
        for _ in range(60):
            _ = x @ x @ x @ x
            start = time.perf_counter()
            dist.all_reduce(small)
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    small, large, x = torch.zeros(16), torch.zeros(2_000_000), torch.randn(512, 512)
    whole = seconds(lambda: dist.all_reduce(large), 20) - seconds(lambda: dist.all_reduce(small), 100)
    flops = 2 * 512**3 / seconds(lambda: x @ x, 10)
    # a link's latency is that of one step, and an all-reduce takes two: scatter and gather
    figures = torch.tensor([meeting() / 2, large.nbytes / max(whole, 1e-9), flops])
    dist.broadcast(figures, 0)  # all ranks have to plan for the same cluster
    latency, bandwidth, flops = figures.tolist()
    cluster = load_cluster("cpu-gloo")
    link = Link(bandwidth, latency)
    device = replace(cluster.device, flops_per_s=(("float32", flops),), efficiency=1.0)
    return replace(cluster, device=device, intra=link, inter=link)


def contenders(world: int) -> dict[str, tuple[nn.Module, dict[str, torch.Tensor]]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import tapas

    inputs, mesh = tokens(), init_device_mesh("cpu", (world,))
    found: dict[str, tuple[nn.Module, dict[str, torch.Tensor]]] = {}
    found["tapas"] = tapas.parallelize(llama(), inputs, mesh=mesh, cluster=measured_cluster()), inputs
    found["ddp"] = DistributedDataParallel(llama()), mine(inputs)
    sharded = llama()
    for layer in sharded.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
    found["fsdp2"] = fully_shard(sharded, mesh=mesh), mine(inputs)
    found["tp_plan"] = _tp_plan(world), inputs
    return found


def _tp_plan(world: int) -> nn.Module:
    """transformers applies its tp_plan when it loads a checkpoint."""
    import transformers

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if dist.get_rank() == 0:
        llama().save_pretrained(folder[0])
    dist.broadcast_object_list(folder, 0)
    return transformers.LlamaForCausalLM.from_pretrained(folder[0], tp_plan="auto", use_cache=False)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The fast one, which takes no mixture of DTensors and others (as tp_plan has them)."""
    kinds = {type(p.data) for p in model.parameters()}
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=len(kinds) == 1 or None)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = model(**inputs)["loss"]
    loss.backward()
    optimizer.step()
    return time.perf_counter() - start, loss.item()


def rank(number: int, world: int, store: str, rounds: int, out: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": str(number)}
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=number, world_size=world)  # type: ignore[attr-defined]
    running = {}
    for name, (model, inputs) in contenders(world).items():
        running[name] = model, optimizer_of(model), inputs
    times: dict[str, list[float]] = {name: [] for name in running}
    losses: dict[str, list[float]] = {name: [] for name in running}
    for number_of_round in range(rounds):
        names = list(running)
        first = number_of_round % len(names)  # nobody is always the one after the largest
        for name in names[first:] + names[:first]:
            dist.barrier()
            seconds, loss = step(*running[name])
            times[name].append(seconds)
            losses[name].append(loss)
    for name in losses:  # ddp and fsdp know the loss of their part only
        total = torch.tensor(losses[name])
        dist.all_reduce(total)
        losses[name] = (total / world).tolist()
    if number == 0:
        Path(out).write_text(json.dumps({"times": times, "losses": losses}))
    dist.destroy_process_group()


def together(world: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "out.json")
        context = multiprocessing.get_context("spawn")
        args = (world, str(Path(folder) / "store"), rounds, out)
        ranks = [context.Process(target=rank, args=(i, *args)) for i in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit("a rank failed")
        return json.loads(Path(out).read_text())


def alone(rounds: int) -> tuple[float, float, float]:
    """Forward and backward of the original and of the rewritten program at one rank, and how their losses differ."""
    from torch.distributed.device_mesh import init_device_mesh

    import tapas

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    inputs, model = tokens(), llama()
    ours = tapas.parallelize(copy.deepcopy(model), inputs, mesh=init_device_mesh("cpu", (1,)))
    times: list[list[float]] = [[], []]
    values = [0.0, 0.0]
    for _ in range(rounds):
        for i, one in enumerate((model, ours)):
            one.zero_grad()
            start = time.perf_counter()
            loss = one(**inputs)["loss"]
            loss.backward()
            times[i].append(time.perf_counter() - start)
            values[i] = loss.item()
    dist.destroy_process_group()
    original, rewritten = (statistics.median(t[2:]) for t in times)
    return original, rewritten, abs(values[0] - values[1])


# -- one code against another ---------------------------------------------------------------------------

PROCESSES, STEPS, TIMES = 6, 40, 3


def measured(number: int, store: str, out: str) -> None:
    """Processor seconds of parallelize and of a step on one of two ranks, at their best."""
    from torch.distributed.device_mesh import init_device_mesh

    import tapas

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=number, world_size=2)  # type: ignore[attr-defined]
    inputs, mesh, made = tokens(), init_device_mesh("cpu", (2,)), []
    for _ in range(1 + TIMES):  # the first one imports
        model = llama()
        start = time.process_time()
        module = tapas.parallelize(model, inputs, mesh=mesh)
        made.append(time.process_time() - start)
    optimizer, steps = optimizer_of(module), []
    for _ in range(STEPS):
        start = time.process_time()
        step(module, optimizer, inputs)
        steps.append(time.process_time() - start)
    if number == 0:
        Path(out).write_text(json.dumps([min(made[1:]), min(steps[5:])]))
    dist.destroy_process_group()


def with_source(source: str) -> list[float]:
    """What `measured` finds with the code of a folder."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("store", "out.json")]
        environment = os.environ | {"PYTHONPATH": source}
        call = f"import runpy; runpy.run_path({__file__!r})['measured']({{}}, *{paths!r})"
        ranks = [subprocess.Popen([sys.executable, "-c", call.format(i)], env=environment) for i in range(2)]
        ended = [process.wait() for process in ranks]
        if any(ended):
            sys.exit(f"a rank failed with the code in {source}")
        return json.loads(Path(paths[1]).read_text())


def against(other: str, console: Any) -> int:
    here = str(Path(__file__).resolve().parents[1] / "src")
    found: dict[str, list[list[float]]] = {here: [], other: []}
    for number in range(PROCESSES):
        for source in (here, other) if number % 2 else (other, here):
            found[source].append(with_source(source))
    for place, (what, most) in enumerate((("parallelize", 1.1), ("a step", 1.01))):
        mine, theirs = ([1e3 * run[place] for run in found[source]] for source in (here, other))
        pairs = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        console.print(
            f"{what}: {statistics.median(mine):.1f} ms, there {statistics.median(theirs):.1f} ms;"
            f" median of the pairs' ratios {pairs:.3f}, of the best {min(mine) / min(theirs):.3f} (wanted {most})"
        )
    return 0


def main() -> int:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--against", metavar="SRC", help="the src folder of another checkout")
    given = parser.parse_args()
    rounds, console = given.rounds, Console()
    if given.against:
        return against(given.against, console)
    found = together(2, rounds)
    medians = {name: statistics.median(times[3:]) for name, times in found["times"].items()}
    best = min(seconds for name, seconds in medians.items() if name != "tapas")
    table = Table(title=f"A step of a small Llama on two local ranks (gloo), {rounds} rounds in turn")
    for heading in ("", "milliseconds", "against the best of the others", "loss, first to last"):
        table.add_column(heading)
    for name, seconds in sorted(medians.items(), key=lambda item: item[1]):
        losses = found["losses"][name]
        table.add_row(name, f"{1e3 * seconds:.1f}", f"{seconds / best:.2f}", f"{losses[0]:.4f} to {losses[-1]:.4f}")
    console.print(table)
    original, rewritten, distance = alone(rounds)
    ratio = rewritten / original
    console.print(
        f"one rank, forward and backward: original {1e3 * original:.1f} ms, ours {1e3 * rewritten:.1f} ms,"
        f" ratio {ratio:.3f} (limit {OVERHEAD}); losses differ by {distance:.1g}"
    )
    slower = medians["tapas"] > SLACK * best
    if slower:
        console.print("ours is slower than the best of the others")
    return int(slower or ratio > OVERHEAD)


if __name__ == "__main__":
    sys.exit(main())
