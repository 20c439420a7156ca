"""Our plans beside known strategies, by the same cost model: all presets, each at its own batch.

    python benchmarks/strategies.py [--models NAME ...] [--meshes MESH ...] [--cluster NAME]

Every strategy is searched to its best under the same prices and within the same memory: DDP, FSDP (`fully_shard`),
HSDP, Megatron-LM's layout without and with sequence parallelism, FSDP with tensor parallelism as in torchtitan, and
transformers' own tp_plan. A ratio is its step time to that of our plan; `*` is one that does not fit into the memory.
The exit status is 1 if one that fits is faster than our plan. Models that were measured on the same day and are in the
file of --json are shown as well.
"""

import statistics
import sys
import time
import warnings
from collections.abc import Iterable
from typing import Any

from _results import Results, parser_for
from _timing import CLUSTER, timed

import tapas
from tapas.errors import TapasError
from tapas.hardware.cluster import memory_limit
from tapas.hardware.cluster_files import load_cluster
from tapas.models.load import PRESETS, load
from tapas.problem.baselines import NAMES


def cell(known: dict[str, Any]) -> str:
    return "" if known["ratio"] is None else f"{known['ratio']:.3f}{'' if known['fits'] else '*'}"


def compared(model: str, mesh: str, cluster: str) -> dict[str, Any]:
    """What is kept of one model: why it has no plan, or its plan and the strategies beside it."""
    loaded, limit = load(model), memory_limit("device", load_cluster(cluster))
    try:
        seconds, plan = timed(
            lambda: tapas.plan(loaded.model, loaded.inputs, mesh=mesh, cluster=cluster), time.process_time
        )
    except TapasError as error:
        return {"why": error.fact}
    found = {}
    for name in NAMES:
        known = plan.baselines.get(name, {"cost": None})
        applies = known["cost"] is not None
        fits = applies and (limit is None or known["memory"] <= limit * (1 + 1e-9))
        found[name] = {"ratio": known["ratio"] if applies else None, "fits": fits}
    return {"cost": plan.cost, "gap": plan.gap / plan.cost, "strategies": found, "seconds": seconds}


def row(model: str, run: dict[str, Any]) -> tuple[str, ...]:
    if "why" in run:
        return model, f"no plan: {run['why']}", *[""] * (len(NAMES) + 2)
    cells = (cell(run["strategies"][name]) for name in NAMES)
    return model, f"{1e3 * run['cost']:.1f}", f"{run['gap']:.3%}", *cells, f"{run['seconds']:.1f}"


def fitting(runs: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Ratios of strategies that fit."""
    known = [run["strategies"] for run in runs if "why" not in run]
    return {name: [one[name]["ratio"] for one in known if one[name]["fits"]] for name in NAMES}


def show(runs: dict[str, dict[str, Any]], mesh: str, cluster: str, out: Results) -> None:
    ordered = {model: runs[model] for model in PRESETS if model in runs}
    title = f"{cluster}, {mesh}: step time of strategies to that of our plan (* does not fit)"
    rows = [row(model, run) for model, run in ordered.items()]
    out.table(f"mesh-{mesh}", title, ("model", "ours, ms", "gap", *NAMES, "seconds"), rows)
    rows = [
        (name, str(len(some)), f"{statistics.median(some):.3f}", f"{min(some):.3f}", f"{max(some):.3f}")
        for name, some in fitting(runs.values()).items()
        if some
    ]
    columns = ("strategy", "plans that fit", "median ratio", "least", "most")
    out.table(f"summary-{mesh}", f"{cluster}, {mesh}: step time to that of our plan", columns, rows)


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(PRESETS), default=list(PRESETS), metavar="NAME")
    parser.add_argument("--meshes", nargs="+", default=["2x4", "8x8"])
    parser.add_argument("--cluster", default=CLUSTER)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    out = Results(given.json)
    least = 1.0
    for mesh in given.meshes:
        runs: dict[str, dict[str, Any]] = {}
        for model in given.models:
            runs = out.runs(f"{given.cluster}, {mesh}", model, compared(model, mesh, given.cluster))
            print(mesh, *row(model, runs[model]), flush=True)
        out.command = f"benchmarks/strategies.py --meshes {mesh} --cluster {given.cluster}"
        show(runs, mesh, given.cluster, out)
        least = min([least, *(ratio for some in fitting(runs.values()).values() for ratio in some)])
    out.want("ours / the fastest strategy that fits", 1 / least, 1.0 + 1e-6)
    return 0 if out.met else 1


if __name__ == "__main__":
    sys.exit(main())
