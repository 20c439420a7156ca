"""Predicted against measured seconds of a step on two local ranks, for the machine as `tapas calibrate` finds it.

    python benchmarks/calibrated.py [--models NAME ...] [--rounds N] [--cluster FILE]

Plans of small models (a Llama, a BERT) that follow known strategies, and the best ones, are trained in turn on two
gloo ranks. Printed are predicted and measured milliseconds, and Kendall's tau between the two orders: 1 if all pairs of
plans are in the right order. Exit code 1 if that is below 0.8, or if a prediction is off by more than 25 %.
"""

import json
import statistics
import sys
import warnings
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _calibrated import WORLD, calibrated
from running import made, on_ranks, optimizer_of, step, tokens

STRATEGIES = ("", "ddp", "fsdp", "megatron", "megatron-sp")  # the first one: the best plan
WARM_UP = 3
TAU, OFF = 0.8, 0.25


def rank(number: int, world: int, store: str, models: list[str], cluster: str, rounds: int, out: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    import tapas

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=number, world_size=world)  # type: ignore[attr-defined]
    mesh, inputs, found = init_device_mesh("cpu", (world,)), tokens(), list[dict[str, Any]]()
    running = []
    for name in models:
        for strategy in STRATEGIES:
            asked = {
                "mesh": "2", "cluster": cluster, "memory": None, "recompute": "none", "baselines": False,
                "pins": {"*": strategy} if strategy else None,
            }  # fmt: skip
            plan = tapas.plan(made(name), inputs, **asked)
            module = tapas.parallelize(made(name), inputs, mesh=mesh, plan=plan)
            running.append((module, optimizer_of("tapas", module)))
            found.append({"model": name, "strategy": strategy or "best", "predicted": plan.cost, "seconds": []})
    for _ in range(rounds):
        for (module, optimizer), row in zip(running, found, strict=True):
            dist.barrier()
            row["seconds"].append(step(module, optimizer, inputs)[0])
    if number == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Of all pairs of plans, those in the right order less the others."""
    signs = [(a - c) * (b - d) for (a, b), (c, d) in combinations(pairs, 2)]
    return sum((s > 0) - (s < 0) for s in signs) / len(signs)


def main() -> int:
    from _results import Results, parser_for

    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", default=["llama", "bert"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cluster", type=Path, help="a file of `tapas calibrate`, instead of measuring")
    chosen = parser.parse_args()
    with calibrated(chosen.cluster) as cluster:
        rows = on_ranks(rank, WORLD, chosen.models, cluster, chosen.rounds)
    shown: list[tuple[str, ...]] = []
    pairs = []
    for row in rows:
        seconds = statistics.median(row["seconds"][WARM_UP:])
        pairs.append((row["predicted"], seconds))
        cells = f"{1e3 * row['predicted']:.1f}", f"{1e3 * seconds:.1f}", f"{row['predicted'] / seconds:.2f}"
        shown.append((row["model"], row["strategy"], *cells))
    tau, off = kendall(pairs), max(abs(a / b - 1) for a, b in pairs)
    out, title = Results(chosen.json), f"A step on {WORLD} gloo ranks, milliseconds, {chosen.rounds} rounds in turn"
    out.table("plans", title, ("model", "strategy", "predicted", "measured", "ratio"), shown)
    out.console.print(f"Kendall's tau {tau:.2f} (wanted {TAU}), farthest off {off:.0%} (wanted {OFF:.0%})")
    return int(tau < TAU or off > OFF)


if __name__ == "__main__":
    sys.exit(main())
