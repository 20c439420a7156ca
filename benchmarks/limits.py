"""Plans within a memory limit: how far from proven the best they are, and how long that takes.

For each preset and mesh the limits are just above what the smallest plan needs (1.05 times as much), and at parts
of the way from there to what the fastest plan needs (`--parts`).
Nothing here is stored: every figure is measured in the run that prints it.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from _timing import CLUSTER, timed, wanted
from rich.console import Console
from rich.table import Table

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--meshes", nargs="+", default=["8", "2x4", "8x8"])
    parser.add_argument("--parts", nargs="+", type=float, default=[0.25, 0.5])
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    table = Table(title=f"The fastest plan that fits, on {CLUSTER}: seconds of processor time")
    for column in ("model", "mesh", "limit", "step time", "gap", "seconds", "copies that do the same"):
        table.add_column(column, justify="left" if column.startswith(("model", "mesh", "copies")) else "right")
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
                table.add_row(model, mesh, limit, cost, f"{gaps[-1]:.3%}", f"{seconds:.1f}", kinds(found))
    console.print(table)
    met = wanted(console, "the largest gap", max(gaps), MOST)
    met &= wanted(console, "seconds in the median", statistics.median(times), USUAL)
    met &= wanted(console, "seconds at worst", max(times), SLOWEST)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
