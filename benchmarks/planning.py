"""How long planning takes, stage by stage, and how that grows with depth.

The first table shows that depth costs nothing after capture, and how little that is beside a capture that walks
all layers; the second compares the search on the folded graph with an integer program on the unfolded one, as the
stand-in for integer-program planners. Nothing here is stored: every figure is measured in the run that prints it.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from _timing import planned, timed, wanted
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tapas.capture import capture, capture_program
from tapas.ir.graph import Graph
from tapas.models.load import LoadedModel, load
from tapas.planner.solution import Solution
from tests.oracle.highs import optimum

CAPTURE_SHARE = 1 / 4  # fold + problem + search against capturing every layer
DEPTH_RATIO = 1.2  # and against the same for few layers


@dataclass(frozen=True)
class Times:
    """Seconds of each stage, the best of several rounds."""

    whole: float  # capture with every layer traced
    capture: float  # with one of each kind
    fold: float
    problem: float
    search: float

    @property
    def planning(self) -> float:
        return self.fold + self.problem + self.search


def loaded(model: str, layers: int) -> LoadedModel:
    return load(model, settings={"num_hidden_layers": str(layers)})


def depths(model: str, mesh: str, few: int, many: int, rounds: int) -> tuple[dict[int, Times], dict[int, Solution]]:
    """Both depths in turn, round by round, so that a busy moment of the machine hits neither alone."""
    made = {layers: loaded(model, layers) for layers in (few, many)}
    graphs: dict[int, Graph] = {}
    walking: dict[int, list[float]] = {few: [], many: []}
    capturing: dict[int, list[float]] = {few: [], many: []}
    stages: dict[int, list[tuple[float, float, float]]] = {few: [], many: []}
    solutions: dict[int, Solution] = {}
    for _ in range(rounds):
        for layers, one in made.items():
            seconds, _ = timed(lambda one=one: capture_program(one.model, one.inputs, training=True, whole=True))
            walking[layers].append(seconds)
            seconds, graphs[layers] = timed(lambda one=one: capture(one.model, one.inputs, training=True, name=model))
            capturing[layers].append(seconds)
    for _ in range(rounds):
        for layers in made:
            seconds, _, solutions[layers] = planned(graphs[layers], mesh)
            stages[layers].append(seconds)
    best = {n: Times(min(walking[n]), min(capturing[n]), *min(stages[n], key=sum)) for n in made}
    return best, solutions


def depth_table(model: str, mesh: str, few: int, many: int, rounds: int, console: Console) -> bool:
    times, solutions = depths(model, mesh, few, many, rounds)
    table = Table(title=f"{model} on {mesh}, training: seconds by stage, best of {rounds}")
    columns = ("whole capture", "capture", "fold", "problem", "search", "after capture", "of whole")
    for column in ("layers", "operators", *columns):
        table.add_column(column, justify="right")
    for layers, t in times.items():
        folded = solutions[layers].problem.folded
        table.add_row(
            str(layers), f"{folded.operators:,} ({folded.unique_operators} unique)", f"{t.whole:.2f}",
            f"{t.capture:.2f}", f"{t.fold:.3f}", f"{t.problem:.3f}", f"{t.search:.3f}", f"{t.planning:.3f}",
            f"{t.planning / t.whole:.3f}",
        )  # fmt: skip
    console.print(table)
    gaps = [solution.answer.gap for solution in solutions.values()]
    share, ratio = times[many].planning / times[many].whole, times[many].planning / times[few].planning
    met = [
        wanted(console, f"fold, problem and search / capture of all {many} layers", share, CAPTURE_SHARE),
        wanted(console, f"fold, problem and search at {many} / at {few} layers", ratio, DEPTH_RATIO),
    ]
    console.print(f"gap between cost and bound: {max(gaps):.3g} s\n")
    return all(met)


def program_table(model: str, mesh: str, layers: list[int], limit: float, console: Console) -> bool:
    table = Table(title=f"{model} on {mesh}, training: search on the folded graph, integer program on the unfolded one")
    for column in ("layers", "operators", "tapas s", "HiGHS s", "ratio", "columns", "same optimum"):
        table.add_column(column, justify="right")
    agree = True
    for count in layers:
        one = loaded(model, count)
        graph = capture(one.model, one.inputs, training=True, name=model)
        stages, problem, solution = min((planned(graph, mesh) for _ in range(3)), key=lambda found: sum(found[0]))
        mine, operators = sum(stages), problem.folded.operators
        try:
            seconds, proven = timed(lambda problem=problem: optimum(problem.network(problem.rows()), limit))
        except RuntimeError as error:
            table.add_row(str(count), f"{operators:,}", f"{mine:.3f}", str(error), "", "", "")
            continue
        same = abs(proven.cost - solution.answer.cost) <= 1e-7 * solution.answer.cost
        agree = agree and same
        table.add_row(
            str(count), f"{operators:,}", f"{mine:.3f}", f"{seconds:.2f}", f"{seconds / mine:.1f}",
            f"{proven.columns:,}", "yes" if same else "NO",
        )  # fmt: skip
    console.print(table)
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3-405b")
    parser.add_argument("--mesh", default="8x16")
    parser.add_argument("--layers", type=int, nargs=2, default=(4, 126), metavar=("FEW", "MANY"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--program-model", default="llama3-8b")
    parser.add_argument("--program-mesh", default="8")
    parser.add_argument("--program-layers", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each integer program")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    few, many = given.layers
    fast = depth_table(given.model, given.mesh, few, many, given.rounds, console)
    agree = program_table(given.program_model, given.program_mesh, given.program_layers, given.limit, console)
    if not fast:
        console.print("planning took longer than wanted (see above)")
    return 0 if fast and agree else 1


if __name__ == "__main__":
    sys.exit(main())
