"""The page of a large plan: how large the file is, and how long a browser takes until all of it is drawn.

From navigation to the mark that the page sets after its first frame, in headless Chromium with an empty profile.
"""

import sys
import tempfile
from pathlib import Path

from _results import Results, parser_for
from _timing import timed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tapas.models.source import ModelSource
from tapas.plan.plan import Plan
from tapas.planner.pipeline import plan_graph
from tapas.planner.request import Request
from tapas.report.html import View, write_page
from tests.report.browser import browser, missing, opened

MEGABYTES, SECONDS = 3.0, 2.0


def planned(model: str, mesh: str) -> Plan:
    source, request = ModelSource(model), Request.of(mesh)
    graph, hints = source.capture(None)
    return source.recorded_in(plan_graph(graph, request, hints))


def drawn(page: Path, rounds: int) -> list[float]:
    """Seconds, each in a browser that was started for it."""
    found = []
    for _ in range(rounds):
        with browser() as driver:
            found.append(opened(driver, page) / 1e3)
    return sorted(found)


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--model", default="llama3-405b")
    parser.add_argument("--mesh", default="64x8")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    out = Results(asked.json)
    plan = planned(asked.model, asked.mesh)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        seconds, _ = timed(lambda: write_page(page, [View(plan)]))
        out.console.print(f"{asked.model} on {asked.mesh}: page written in {seconds:.2f} s")
        megabytes, shown = page.stat().st_size / 1e6, "not opened"
        out.want("megabytes", megabytes, MEGABYTES)
        if missing():
            out.console.print(f"not opened: {missing()}")
        else:
            times = drawn(page, asked.rounds)
            shown = f"{times[len(times) // 2]:.2f} ({times[0]:.2f} to {times[-1]:.2f})"
            out.want("median seconds until drawn", times[len(times) // 2], SECONDS)
    columns = ("model", "mesh", "megabytes", "seconds until drawn, median (range)")
    out.table("page", "The page of a plan", columns, [(asked.model, asked.mesh, f"{megabytes:.2f}", shown)])
    return 0 if out.met else 1


if __name__ == "__main__":
    sys.exit(main())
