"""What the cost model says of models that were measured on a GPU: device time and memory, planned over measured.

    python benchmarks/measured.py [--models NAME ...] [--families] [--ranks | --compile]

The measurements are in measured_h200.json. Planned is forward and backward on one device, without the optimizer's
update, against the time that the GPU was busy with the kernels of our program (eager); simulated is the same with the
host that launches operators, against the time that passed. `--families` shows what operators of each family take.
`--compile` plans compiled programs, whose memory is compared without the optimizer's. `--ranks` plans the first of
several ranks; operators are compared, and copies shown that stand in for what would arrive, or pack it.
"""

import json
import statistics
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from _models import MODELS, without_data
from _results import Results, parser_for

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


def planned(name: str, mesh: str = "1", pins: str = "", batch: int | None = None, compiled: bool = False) -> Solution:
    model, inputs = without_data(name, batch)
    graph = capture(model, inputs, training=True, name=name)
    request = Request.of(
        mesh, CLUSTER, memory=None, recompute="none", baselines=False, pins={"*": pins} if pins else None,
        optimizer=Optimizer("adam", master=False),  # what AdamW keeps of bfloat16 weights
        compile=compiled,
    )  # fmt: skip
    return within(graph, request, tp_hints(model)).best()


def computed_ms(found: Solution) -> float:
    seconds = found.seconds()
    return 1e3 * (seconds["forward"] + seconds["backward"])


def simulated_ms(found: Solution, compiled: bool = False) -> float:
    """The same with the host, without the optimizer's update."""
    step = simulate(assemble(found, {}, source={"compile": compiled}))
    assert step is not None
    return 1e3 * (step.seconds - found.seconds()["update"])


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


def models_table(rows: list[dict[str, Any]], detailed: bool, out: Results) -> None:
    shown: list[tuple[str, ...]] = []
    ratios, walls, memories = list[float](), list[float](), list[float]()
    for row in rows:
        found = planned(row["model"])
        ms, memory = computed_ms(found), sum(found.memory().values()) / 1e6
        busy = row["operators_ms"] + row["moves_ms"]
        ratios.append(ms / busy)
        memories.append(memory / row["memory_mb"])
        wall = simulated_ms(found)
        walls.append(wall / row["ms"])
        figures = f"{memory:.0f}", f"{row['memory_mb']:.0f}", f"{memories[-1]:.2f}"
        shown.append((
            row["model"], f"{ms:.1f}", f"{busy:.1f}", f"{ratios[-1]:.2f}", f"{wall:.1f}",
            f"{row['ms']:.1f}", f"{walls[-1]:.2f}", *figures,
        ))  # fmt: skip
        if detailed:
            listed = ", ".join(f"{name} {ms:.2f}" for name, ms in by_target(found).most_common(14))
            print(f"{row['model']}: {listed}", flush=True)
    columns = (
        "",
        "planned ms",
        "busy ms",
        "ratio",
        "simulated ms",
        "wall ms",
        "ratio",
        "planned MB",
        "measured MB",
        "ratio",
    )
    out.table("models", f"{CLUSTER}, one device: forward and backward, memory", columns, shown)
    columns = ("", "models", "median ratio", "least", "most", f"within {NEAR:.0%}", f"within {FAR:.0%}")
    rows_of = {"device time": ratios, "step, with the host": walls, "memory": memories}
    out.table(
        "summary", f"{CLUSTER}: planned / measured", columns, [(name, *_spread(r)) for name, r in rows_of.items()]
    )


def _spread(ratios: list[float]) -> tuple[str, ...]:
    near, far = (sum(abs(r - 1) <= limit for r in ratios) for limit in (NEAR, FAR))
    return f"{len(ratios)}", *(f"{f(ratios):.2f}" for f in (statistics.median, min, max)), f"{near}", f"{far}"


def compiled_table(rows: list[dict[str, Any]], out: Results) -> None:
    def beside(ours: float, measured: float | None) -> tuple[str, str, str]:
        return f"{ours:.1f}", *((f"{measured:.1f}", f"{ours / measured:.2f}") if measured else ("", ""))

    shown: list[tuple[str, ...]] = []
    for row in rows:
        found = planned(row["model"], compiled=True)
        memory = sum(nbytes for kind, nbytes in found.memory().items() if kind != "optimizer") / 1e6
        times = *beside(computed_ms(found), row.get("busy_ms")), *beside(simulated_ms(found, True), row["ms"])
        shown.append((row["model"], *times, *beside(memory, row.get("memory_mb"))))
    columns = (
        "", "planned ms", "busy ms", "ratio", "simulated ms", "wall ms", "ratio", "planned MB", "measured MB", "ratio",
    )  # fmt: skip
    out.table("compiled", f"{CLUSTER}, one device, compiled: forward and backward, memory", columns, shown)


def ranks_table(rows: list[dict[str, Any]], out: Results) -> None:
    shown: list[tuple[str, ...]] = []
    for row in rows:
        found = planned(row["model"], row["mesh"], row["pins"], row["batch"])
        memory = sum(found.memory().values()) / 1e6
        name = f"{row['model']}:{row['batch']}, {row['mesh']} {row['pins']}"
        shown.append((
            name, f"{computed_ms(found):.1f}", f"{row['operators_ms']:.1f}",
            f"{computed_ms(found) / row['operators_ms']:.2f}", f"{row['moves_ms']:.1f}", f"{memory:.0f}",
            f"{row['memory_mb']:.0f}", f"{memory / row['memory_mb']:.2f}",
        ))  # fmt: skip
    columns = ("", "planned ms", "operators ms", "ratio", "copies ms", "planned MB", "measured MB", "ratio")
    out.table("ranks", f"{CLUSTER}, rank 0 of several: computed and packed, memory", columns, shown)


def main() -> int:
    data = json.loads(FILE.read_text(encoding="utf-8"))
    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--compile", action="store_true")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    out = Results(chosen.json)
    if chosen.ranks:
        ranks_table([row for row in data["ranks"] if row["model"] in chosen.models], out)
    elif chosen.compile:
        compiled_table([row for row in data["compiled"] if row["model"] in chosen.models], out)
    else:
        models_table([row for row in data["models"] if row["model"] in chosen.models], chosen.families, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
