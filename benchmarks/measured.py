"""What the cost model says of models that were measured on a GPU: device time and memory, planned over measured.

    python benchmarks/measured.py [--models NAME ...] [--families] [--ranks]

The measurements are in measured_h200.json. Planned is forward and backward on one device, without the optimizer's
update, against the time that the GPU was busy with kernels (eager); simulated is the same with the host that launches
operators, against the time that passed. `--families` shows what operators of each family
take. `--ranks` plans the first of several ranks; the measured programs packed a tensor up to three times for a move, so
where much was packed only what they computed tells something.
"""

import argparse
import json
import statistics
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from _models import MODELS, without_data
from rich.console import Console
from rich.table import Table

from tapas.capture import capture
from tapas.cost.memory import Optimizer
from tapas.plan.simulate import simulate
from tapas.planner.describe import assemble
from tapas.planner.pipeline import tp_hints, within
from tapas.planner.request import Request
from tapas.planner.solution import Solution
from tapas.problem.problem import OpVariable

CLUSTER = "h200-sxm"
NEAR, FAR = 0.15, 0.3
FILE = Path(__file__).with_name("measured_h200.json")


def planned(name: str, mesh: str = "1", pins: str = "", batch: int | None = None) -> Solution:
    model, inputs = without_data(name, batch)
    graph = capture(model, inputs, training=True, name=name)
    request = Request.of(
        mesh, CLUSTER, memory=None, recompute="none", baselines=False, pins={"*": pins} if pins else None,
        optimizer=Optimizer("adam", master=False),  # what AdamW keeps of bfloat16 weights
    )  # fmt: skip
    return within(graph, request, tp_hints(model)).best()


def computed_ms(found: Solution) -> float:
    seconds = found.seconds()
    return 1e3 * (seconds["forward"] + seconds["backward"])


def by_target(found: Solution) -> Counter[str]:
    """Milliseconds forward and backward."""
    total: Counter[str] = Counter()
    for group in found.groups():
        for variable, choice in zip(found.part(group).variables, group.choices, strict=False):
            if isinstance(variable, OpVariable):
                table, copies = variable.table, len(group.copies)
                name = variable.op.target
                total[f"{name} >"] += 1e3 * copies * float(table.forward_seconds[choice])
                total[f"{name} <"] += 1e3 * copies * float(table.backward_seconds[choice])
    return total


def ratio(planned: float, measured: float | None) -> str:
    return f"{planned / measured:.2f}" if measured else ""


def models_table(rows: list[dict[str, Any]], detailed: bool) -> tuple[Table, dict[str, list[float]]]:
    table = Table(title=f"{CLUSTER}, one device: forward and backward in ms, memory in MB")
    for heading in ("", "planned", "busy", "ratio", "simulated", "wall", "ratio", "planned", "measured", "ratio"):
        table.add_column(heading, justify="left" if not heading else "right")
    ratios, walls = list[float](), list[float]()
    for row in rows:
        found = planned(row["model"])
        ms, memory = computed_ms(found), sum(found.memory().values()) / 1e6
        ratios.append(ms / row["busy_ms"])
        step = simulate(assemble(found, {}))
        assert step is not None
        wall = 1e3 * (step.seconds - found.seconds()["update"])
        walls.append(wall / row["original_ms"])
        figures = f"{memory:.0f}", f"{row['memory_mb'] or 0:.0f}", ratio(memory, row["memory_mb"])
        table.add_row(
            row["model"],
            f"{ms:.1f}",
            f"{row['busy_ms']:.1f}",
            f"{ratios[-1]:.2f}",
            f"{wall:.1f}",
            f"{row['original_ms']}",
            f"{walls[-1]:.2f}",
            *figures,
        )
        if detailed:
            listed = ", ".join(f"{name} {ms:.2f}" for name, ms in by_target(found).most_common(14))
            print(f"{row['model']}: {listed}", flush=True)
    return table, {"busy": ratios, "wall": walls}


def ranks_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{CLUSTER}, rank 0 of several: ms computed and packed, memory in MB")
    for heading in ("", "computed", "busy less copies", "busy", "planned", "measured", "ratio"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in rows:
        found = planned(row["model"], row["mesh"], row["pins"], row["batch"])
        memory = sum(found.memory().values()) / 1e6
        name = f"{row['model']}:{row['batch']}, {row['mesh']} {row['pins']}"
        table.add_row(
            name, f"{computed_ms(found):.1f}", f"{row['busy_ms'] - row['copies_ms']:.1f}",
            f"{row['busy_ms']:.1f}", f"{memory:.0f}", f"{row['memory_mb']}", ratio(memory, row["memory_mb"]),
        )  # fmt: skip
    return table


def main() -> int:
    data = json.loads(FILE.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--ranks", action="store_true")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    console = Console(width=None if sys.stdout.isatty() else 120)
    if chosen.ranks:
        console.print(ranks_table([row for row in data["ranks"] if row["model"] in chosen.models]))
        return 0
    table, ratios = models_table([row for row in data["models"] if row["model"] in chosen.models], chosen.families)
    console.print(table)
    for name, found in ratios.items():
        near, far = (sum(abs(r - 1) <= limit for r in found) for limit in (NEAR, FAR))
        within = f"{near} of {len(found)} within {NEAR:.0%}, {far} within {FAR:.0%}"
        console.print(f"{name}: median {statistics.median(found):.2f}, {within}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
