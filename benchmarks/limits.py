"""Plans within a memory limit: how far from proven the best they are, and how long that takes.

For each preset the limit lies between what the smallest plan and what the fastest plan needs (`--part` of the way).
Nothing here is stored: every figure is measured in the run that prints it.
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace

from _timing import CLUSTER, timed, wanted
from rich.console import Console
from rich.table import Table

from tapas.capture import capture
from tapas.models.load import PRESETS, load
from tapas.planner.fit import LimitedProblem, search
from tapas.planner.pipeline import within
from tapas.planner.request import Request
from tapas.planner.solution import Solution

MOST = 0.01  # gap, relative to the cost
USUAL = 0.5  # part of the presets whose gap is not zero


def limits_of(model: str, mesh: str, part: float) -> LimitedProblem:
    loaded = load(model)
    asked = within(capture(loaded.model, loaded.inputs, name=model), Request.of(mesh, CLUSTER, memory=None))
    fastest, smallest = search(asked.problem, asked.rows).peak.nbytes, asked.smallest().nbytes
    return replace(asked, limit=smallest + part * (fastest - smallest))


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
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--part", type=float, default=0.5)
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    table = Table(title=f"The fastest plan that fits, on {given.mesh} of {CLUSTER}: seconds of processor time")
    for column in ("model", "limit", "step time", "gap", "seconds", "copies that do the same"):
        table.add_column(column, justify="left" if column.startswith(("model", "copies")) else "right")
    gaps = []
    for model in given.models:
        asked = limits_of(model, given.mesh, given.part)
        seconds, found = timed(asked.best, time.process_time)
        gaps.append(found.answer.gap / found.answer.cost)
        limit, cost = f"{(asked.limit or 0.0) / 1e9:.4g} GB", f"{found.answer.cost:.4g}"
        table.add_row(model, limit, cost, f"{gaps[-1]:.3%}", f"{seconds:.1f}", kinds(found))
    console.print(table)
    met = wanted(console, "the largest gap", max(gaps), MOST)
    met &= wanted(console, "the part of presets with a gap", sum(gap > 0 for gap in gaps) / len(gaps), USUAL)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
