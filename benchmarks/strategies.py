"""Our plans beside known strategies, by the same cost model: all presets, each at its own batch.

    python benchmarks/strategies.py [--models NAME ...] [--meshes MESH ...] [--cluster NAME]

Every strategy is searched to its best under the same prices and within the same memory: DDP, FSDP (`fully_shard`),
HSDP, Megatron-LM's layout without and with sequence parallelism, FSDP with tensor parallelism as in torchtitan, and
transformers' own tp_plan. A ratio is its step time to that of our plan; `*` is one that does not fit into the memory.
The exit status is 1 if one that fits is faster than our plan.
"""

import statistics
import sys
import time
import warnings

from _results import Results, parser_for
from _timing import CLUSTER, timed

import tapas
from tapas.errors import TapasError
from tapas.hardware.cluster import memory_limit
from tapas.hardware.cluster_files import load_cluster
from tapas.models.load import PRESETS, load
from tapas.plan.plan import Plan
from tapas.problem.baselines import NAMES


def cell(plan: Plan, strategy: str, limit: float | None) -> tuple[str, float | None]:
    """As shown; and the ratio, where it fits."""
    known = plan.baselines.get(strategy, {"cost": None})
    if known["cost"] is None:
        return "", None
    fits = limit is None or known["memory"] <= limit * (1 + 1e-9)
    return f"{known['ratio']:.3f}{'' if fits else '*'}", known["ratio"] if fits else None


def summary(ratios: dict[str, list[float]]) -> list[tuple[str, ...]]:
    rows = []
    for strategy, some in ratios.items():
        if some:
            low, middle, high = min(some), statistics.median(some), max(some)
            rows.append((strategy, str(len(some)), f"{middle:.2f}", f"{low:.3f}", f"{high:.2f}"))
    return rows


def row(model: str, mesh: str, cluster: str, ratios: dict[str, list[float]]) -> tuple[str, ...]:
    """Of one model; ratios of what fits are added to those of the others."""
    loaded, limit = load(model), memory_limit("device", load_cluster(cluster))
    try:
        seconds, plan = timed(
            lambda: tapas.plan(loaded.model, loaded.inputs, mesh=mesh, cluster=cluster), time.process_time
        )
    except TapasError as error:
        return model, f"no plan: {error.fact}", *[""] * (len(NAMES) + 2)
    cells = {name: cell(plan, name, limit) for name in NAMES}
    for name, (_, ratio) in cells.items():
        ratios[name] += [] if ratio is None else [ratio]
    shown = (text for text, _ in cells.values())
    return model, f"{1e3 * plan.cost:.1f}", f"{plan.gap / plan.cost:.3%}", *shown, f"{seconds:.1f}"


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(PRESETS), default=list(PRESETS), metavar="NAME")
    parser.add_argument("--meshes", nargs="+", default=["2x4", "8x8"])
    parser.add_argument("--cluster", default=CLUSTER)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    out = Results(given.json)
    ratios: dict[str, list[float]] = {name: [] for name in NAMES}
    for mesh in given.meshes:
        rows = []
        for model in given.models:
            rows.append(row(model, mesh, given.cluster, ratios))
            print(mesh, *rows[-1], flush=True)
        title = f"{given.cluster}, {mesh}: step time of strategies to that of our plan (* does not fit)"
        out.table(f"mesh-{mesh}", title, ("model", "ours, ms", "gap", *NAMES, "seconds"), rows)
    columns = ("strategy", "plans that fit", "median ratio", "least", "most")
    out.table("summary", f"{given.cluster}, {' and '.join(given.meshes)}: step time to ours", columns, summary(ratios))
    least = min((ratio for some in ratios.values() for ratio in some), default=1.0)
    out.want("ours / the fastest strategy that fits", 1 / least, 1.0 + 1e-6)
    return 0 if out.met else 1


if __name__ == "__main__":
    sys.exit(main())
