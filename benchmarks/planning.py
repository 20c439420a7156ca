"""How long planning takes, stage by stage, and how that grows with depth.

The first table shows that depth costs nothing after capture, and how little that is beside a capture that walks
all layers; the second compares the search on the folded graph with an integer program on the unfolded one, as the
stand-in for integer-program planners. `--cpu` takes processor time instead of wall time.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from _results import Results, parser_for
from _timing import Clock, planned, span, timed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tapas.capture import capture, capture_program
from tapas.ir.graph import Graph
from tapas.models.load import LoadedModel, load
from tapas.planner.solution import Solution
from tests.oracle.highs import optimum

CAPTURE_SHARE = 1 / 4  # fold + problem + search against capturing every layer
DEPTH_RATIO = 1.2  # and against the same for few layers
ROUNDS = 3  # of our search, beside one of an integer program


@dataclass
class Times:
    """Seconds of each round."""

    whole: list[float] = field(default_factory=list)  # capture with every layer traced
    capture: list[float] = field(default_factory=list)  # with one of each kind
    stages: list[tuple[float, float, float]] = field(default_factory=list)  # fold, problem, search

    @property
    def planning(self) -> list[float]:
        return [sum(stages) for stages in self.stages]


def loaded(model: str, layers: int) -> LoadedModel:
    return load(model, settings={"num_hidden_layers": str(layers)})


def depths(
    model: str, mesh: str, layers: Sequence[int], rounds: int, clock: Clock
) -> tuple[dict[int, Times], dict[int, Solution]]:
    """All depths in turn, round by round, so that a busy moment of the machine hits none alone."""
    made = {n: loaded(model, n) for n in layers}
    times = {n: Times() for n in layers}
    graphs: dict[int, Graph] = {}
    solutions: dict[int, Solution] = {}
    for _ in range(rounds):
        for n, one in made.items():
            walk = partial(capture_program, one.model, one.inputs, training=True, whole=True)
            times[n].whole.append(timed(walk, clock)[0])
            seconds, graphs[n] = timed(partial(capture, one.model, one.inputs, training=True, name=model), clock)
            times[n].capture.append(seconds)
    for _ in range(rounds):
        for n in made:
            stages, _, solutions[n] = planned(graphs[n], mesh, clock)
            times[n].stages.append(stages)
    return times, solutions


def depth_table(model: str, mesh: str, few: int, many: int, rounds: int, clock: Clock, out: Results) -> None:
    times, solutions = depths(model, mesh, (few, many), rounds, clock)
    rows = []
    for layers, t in times.items():
        folded = solutions[layers].problem.folded
        stages = [list(seconds) for seconds in zip(*t.stages, strict=True)]
        rows.append((
            str(layers), f"{folded.operators:,} ({folded.unique_operators} unique)", span(t.whole), span(t.capture),
            *(span(seconds, 3) for seconds in stages), span(t.planning, 3), f"{min(t.planning) / min(t.whole):.3f}",
        ))  # fmt: skip
    columns = ("whole capture", "capture", "fold", "problem", "search", "after capture", "of whole")
    title = f"{model} on {mesh}, training: seconds{kind(clock)} by stage, best (worst) of {rounds}"
    out.table("stages", title, ("layers", "operators", *columns), rows)
    share = min(times[many].planning) / min(times[many].whole)
    ratio = min(times[many].planning) / min(times[few].planning)
    out.want(f"fold, problem and search / capture of all {many} layers", share, CAPTURE_SHARE)
    out.want(f"fold, problem and search at {many} / at {few} layers", ratio, DEPTH_RATIO)
    gaps = [solution.answer.gap for solution in solutions.values()]
    out.console.print(f"gap between cost and bound: {max(gaps):.3g} s\n")


def program_table(model: str, mesh: str, layers: list[int], limit: float, clock: Clock, out: Results) -> bool:
    """Whether both found the same optimum, wherever the integer program was solved."""
    agree = True
    rows: list[tuple[str, ...]] = []
    for count in layers:
        one = loaded(model, count)
        graph = capture(one.model, one.inputs, training=True, name=model)
        found = [planned(graph, mesh, clock) for _ in range(ROUNDS)]
        _, problem, solution = found[0]
        mine, operators = [sum(stages) for stages, *_ in found], problem.folded.operators
        try:
            seconds, proven = timed(lambda problem=problem: optimum(problem.network(problem.rows()), limit), clock)
        except RuntimeError as error:
            rows.append((str(count), f"{operators:,}", span(mine, 3), str(error), "", "", ""))
        else:
            same = abs(proven.cost - solution.answer.cost) <= 1e-7 * solution.answer.cost
            agree = agree and same
            rows.append((
                str(count), f"{operators:,}", span(mine, 3), f"{seconds:.2f}", f"{seconds / min(mine):.0f}",
                f"{proven.columns:,}", "yes" if same else "NO",
            ))  # fmt: skip
    title = f"{model} on {mesh}, training: search on the folded graph, integer program on the unfolded one"
    columns = ("layers", "operators", "tapas s", "HiGHS s", "ratio", "columns", "same optimum")
    out.table(f"program-{mesh}", f"{title}; seconds{kind(clock)}, ours best (worst) of {ROUNDS}", columns, rows)
    return agree


def kind(clock: Clock) -> str:
    return " of processor time" if clock is time.process_time else ""


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--model", default="llama3-405b")
    parser.add_argument("--mesh", default="8x16")
    parser.add_argument("--layers", type=int, nargs=2, default=(4, 126), metavar=("FEW", "MANY"))
    parser.add_argument("--rounds", type=int, default=3, help="for the table by stage; 0: leave it out")
    parser.add_argument("--program-model", default="llama3-8b")
    parser.add_argument("--program-mesh", nargs="+", default=["8", "8x8"])
    parser.add_argument("--program-layers", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each integer program")
    parser.add_argument("--cpu", action="store_true", help="processor time, for a machine that others use as well")
    given = parser.parse_args()
    out, clock = Results(given.json), time.process_time if given.cpu else time.perf_counter
    few, many = given.layers
    if given.rounds:
        depth_table(given.model, given.mesh, few, many, given.rounds, clock, out)
    agree = [
        program_table(given.program_model, mesh, given.program_layers, given.limit, clock, out)
        for mesh in given.program_mesh
    ]
    if not out.met:
        out.console.print("planning took longer than wanted (see above)")
    return 0 if out.met and all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
