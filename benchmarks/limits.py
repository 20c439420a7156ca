"""Plans within a memory limit: how far from proven the best they are, and how long that takes.

For each preset and mesh the limits are just above what the smallest plan needs (1.05 times as much), and at parts
of the way from there to what the fastest plan needs (`--parts`).
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from _results import Results, parser_for
from _timing import CLUSTER, timed

from tapas.capture import capture
from tapas.ir.graph import Graph
from tapas.models.load import PRESETS, load
from tapas.planner.fit import LimitedProblem, search
from tapas.planner.pipeline import within
from tapas.planner.request import Request
from tapas.planner.solution import Solution

LEAST = 1.05  # times what the smallest plan needs: the lowest limit
MOST = 0.001  # gap, relative to the cost
USUAL, SLOWEST = 1.5, 5.0  # seconds


def limits_of(graph: Graph, mesh: str, parts: Sequence[float]) -> list[LimitedProblem]:
    asked = within(graph, Request.of(mesh, CLUSTER, memory=None))
    fastest, smallest = search(asked.problem, asked.rows).peak.nbytes, asked.smallest().nbytes
    limits = [LEAST * smallest, *(smallest + part * (fastest - smallest) for part in parts)]
    return [replace(asked, limit=limit, learnt={}) for limit in limits if limit < fastest]


def kinds(found: Solution) -> str:
    """How many copies of each repeated block do the same."""
    copies = zip(found.problem.folded.copies, found.answer.choices, strict=True)
    per_block: dict[int, Counter] = {}
    for copy, own in copies:
        per_block.setdefault(copy.block, Counter())[own] += 1
    several = (count for count in per_block.values() if count.total() > 1)
    return ", ".join("+".join(str(times) for _, times in count.most_common()) for count in several)


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--meshes", nargs="+", default=["8", "2x4", "8x8"])
    parser.add_argument("--parts", nargs="+", type=float, default=[0.25, 0.5])
    given = parser.parse_args()
    out = Results(given.json)
    rows: list[tuple[str, ...]] = []
    gaps, times = [], []
    for model in given.models:
        loaded = load(model)
        graph = capture(loaded.model, loaded.inputs, name=model)
        for mesh in given.meshes:
            for asked in limits_of(graph, mesh, given.parts):
                seconds, found = timed(asked.best, time.process_time)
                gaps.append(found.answer.gap / found.answer.cost)
                times.append(seconds)
                limit, cost = f"{(asked.limit or 0.0) / 1e9:.4g} GB", f"{found.answer.cost:.4g}"
                rows.append((model, mesh, limit, cost, f"{gaps[-1]:.3%}", f"{seconds:.1f}", kinds(found)))
    columns = ("model", "mesh", "limit", "step time", "gap", "seconds", "copies that do the same")
    out.table("limits", f"The fastest plan that fits, on {CLUSTER}: seconds of processor time", columns, rows)
    out.table(
        "summary", f"The fastest plan that fits, on {CLUSTER}: seconds of processor time, {len(times)} problems",
        ("", "in the median", "at worst"),
        [("gap", f"{statistics.median(gaps):.4%}", f"{max(gaps):.3%}"),
         ("seconds", f"{statistics.median(times):.2f}", f"{max(times):.1f}")],
    )  # fmt: skip
    out.want("the largest gap", max(gaps), MOST)
    out.want("seconds in the median", statistics.median(times), USUAL)
    out.want("seconds at worst", max(times), SLOWEST)
    return 0 if out.met else 1


if __name__ == "__main__":
    sys.exit(main())
