"""Search time and layout of AutoParallel beside ours: the same model, mesh, batch and kind of GPU.

    python benchmarks/against_autoparallel.py --autoparallel CHECKOUT [--layers N ...] [--mesh 8x8]

Both run once for each depth, in a process of their own that has made no plan before; imports and making the model are
not counted. Seconds are of processor time (with --wall: of the clock), those of AutoParallel's solver, which is another
process, included. Then our cost model prices what AutoParallel chose: its storage of the weights, with the work split
as is best for that; and with the results of all matmuls and embeddings split as it does, too. What else it chose, such
as the layouts of its backward operators, has no counterpart in a plan of ours. Depths that were measured on the same
day and are in the file of --json are shown as well.
"""

import multiprocessing
import os
import re
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from _autoparallel import VARIABLE, Searched, commit, missing, now, search, since
from _results import Results, parser_for
from _timing import CLUSTER

import tapas
from tapas.capture import capture
from tapas.errors import TapasError
from tapas.export.dtensor_placements import FORMAT
from tapas.export.exported import starred
from tapas.export.foreign import placement_pins
from tapas.hardware.mesh import parse_mesh
from tapas.ir.fold import fold
from tapas.ir.graph import Graph
from tapas.models.load import load
from tapas.planner.pipeline import plan_graph
from tapas.planner.request import Request

COMMAND = "benchmarks/against_autoparallel.py --autoparallel CHECKOUT"
STAGES = ("trace", "program", "solve")
PRODUCTS = ("aten.linear.default", "aten.embedding.default")


def in_new_process(work: Any, *given: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(work, *given).result()


def ours(model: str, settings: dict[str, str], mesh: str) -> tuple[tuple[float, float], float]:
    """Seconds of the first plan of this process, and what it costs."""
    warnings.simplefilter("ignore")
    loaded = load(model, settings=settings)
    start = now()
    plan = tapas.plan(loaded.model, loaded.inputs, mesh=mesh, cluster=CLUSTER)
    return since(start), plan.cost


def result_pins(graph: Graph, results: dict[str, list[str]]) -> tuple[dict[str, str], set[str]]:
    """Operator -> layout of its result; and modules that have none: layers that are not alike (a block is decided
    once), and results that are whole on an axis, of which DTensor does not say what their gradient is."""
    alike: dict[str, set[tuple[str, ...]]] = {}
    for module, texts in results.items():
        states = tuple(text.replace("Shard(dim=", "S(").replace("Partial(sum)", "P") for text in texts)
        alike.setdefault(starred(module), set()).add(states)
    said = {
        pattern: f"[{', '.join(min(states))}]"
        for pattern, states in alike.items()
        if len(states) == 1 and all(re.fullmatch(r"P|S\(\d+\)", state) for state in min(states))
    }
    operators = [op for block in fold(graph).blocks for op in block.ops if op.target in PRODUCTS]
    pins = {op.name: said[starred(op.module)] for op in operators if starred(op.module) in said}
    return pins, {module for module in results if starred(module) not in said}


def priced(model: str, settings: dict[str, str], mesh: str, found: Searched) -> tuple[list[float | str], set[str]]:
    """Step time of our plan within what AutoParallel chose: the weights' storage, then also the results."""
    loaded = load(model, settings=settings)
    graph = capture(loaded.model, loaded.inputs, training=True, name=model)
    shapes = {path: list(graph.tensors[leaf.tensor].shape) for leaf in graph.parameters() for path in leaf.paths}
    stored = {name: {"shape": shapes[name], "placements": texts} for name, texts in found.weights.items()}
    data = {"format": FORMAT, "mesh": {"sizes": list(parse_mesh(mesh).sizes)}, "parameters": stored}
    weights = dict(placement_pins(data, "AutoParallel", parse_mesh(mesh)))
    results, left = result_pins(graph, found.results)
    costs: list[float | str] = []
    for pins in (weights, {**weights, **results}):
        try:
            costs.append(plan_graph(graph, Request.of(mesh, CLUSTER, pins=pins, baselines=False)).cost)
        except TapasError as error:
            costs.append(str(error).splitlines()[0])
    return costs, left


def layouts(found: Searched, left: set[str]) -> list[tuple[str, ...]]:
    """One row for all layers that are alike."""
    rows: dict[tuple[str, str], int] = {}
    for kind, chosen in (("stored", found.weights), ("result", found.results)):
        for name, texts in chosen.items():
            mark = ", not imported" if kind == "result" and name in left else ""
            key = starred(name), f"{kind} {', '.join(t.replace('dim=', '') for t in texts)}{mark}"
            rows[key] = rows.get(key, 0) + 1
    return [(name, layout, str(times)) for (name, layout), times in rows.items()]


def compared(checkout: str, model: str, layers: int, mesh: str) -> dict[str, Any]:
    """Everything about one depth, as it is kept."""
    settings = {"num_hidden_layers": str(layers)}
    found = in_new_process(search, checkout, model, settings, parse_mesh(mesh).sizes)
    mine, cost = in_new_process(ours, model, settings, mesh)
    prices, left = priced(model, settings, mesh, found)
    return {
        "theirs": [found.seconds[stage] for stage in STAGES], "ours": mine, "variables": found.variables,
        "cost": cost, "prices": prices, "objective": found.objective, "layout": layouts(found, left),
    }  # fmt: skip


def show(runs: dict[int, dict[str, Any]], where: str, wall: bool, out: Results) -> None:
    place, kind = (0, "wall") if wall else (1, "processor")
    times: list[tuple[str, ...]] = []
    prices: list[tuple[str, ...]] = []
    for layers, run in runs.items():
        theirs, mine, cost = [seconds[place] for seconds in run["theirs"]], run["ours"][place], run["cost"]
        shown = [f"{1e3 * c:.1f} ms ({c / cost:.3f})" if isinstance(c, float) else c for c in run["prices"]]
        times.append((
            str(layers), *(f"{s:.1f}" for s in theirs), f"{sum(theirs):.1f}", f"{run['variables']:,}", f"{mine:.2f}",
            f"{sum(theirs) / mine:.0f}",
        ))  # fmt: skip
        prices.append((str(layers), f"{1e3 * cost:.1f} ms", *shown, f"{run['objective'] / 1e3:.1f} ms"))
    columns = ("layers", *STAGES, "AutoParallel", "variables", "tapas.plan", "ratio")
    out.table("time", f"{where}: seconds of {kind} time, once, first plan of a process", columns, times)
    columns = ("layers", "our plan", "its weights' storage", "and its results of matmuls", "by its own model")
    out.table("price", f"{where}: step time by our cost model (ratio to our plan)", columns, prices)
    deepest = max(runs)
    columns = ("parameter or module", "placements by axis", "times")
    out.table("layout", f"{where}, layers: {deepest}; what AutoParallel chose", columns, runs[deepest]["layout"])
    lines = {"AutoParallel": {n: sum(s[place] for s in run["theirs"]) for n, run in runs.items()},
             "tapas.plan": {n: run["ours"][place] for n, run in runs.items()}}  # fmt: skip
    out.curves("time", f"Search for {where}", "layers", f"seconds of {kind} time", lines)


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--autoparallel", default=os.environ.get(VARIABLE, ""), metavar="CHECKOUT")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--mesh", default="8x8")
    parser.add_argument("--wall", action="store_true", help="time by the clock, for a machine that nobody else uses")
    given = parser.parse_args()
    out = Results(given.json)
    if reason := missing(given.autoparallel):
        out.console.print(f"AutoParallel is not compared: {reason}", markup=False)
        return 0
    out.versions["AutoParallel"] = commit(given.autoparallel)
    where = f"{given.model} on {given.mesh}"
    for layers in given.layers:
        kept = out.runs(where, str(layers), compared(given.autoparallel, given.model, layers, given.mesh))
        runs = {number: kept[str(number)] for number in sorted(map(int, kept))}
        out.command = f"{COMMAND} --model {given.model} --mesh {given.mesh} --layers {' '.join(map(str, runs))}"
        show(runs, where, given.wall, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
