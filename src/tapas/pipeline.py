"""The composition: capture -> fold -> problem -> search -> plan."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tapas.assemble import assemble, warnings_of
from tapas.baselines import NAMES, STRATEGIES, pin_strategy
from tapas.cluster import Cluster, Mesh, check_mesh, load_cluster, parse_mesh
from tapas.collector import paused
from tapas.errors import PlanError, nearest
from tapas.fold import fold, split
from tapas.graph import Graph
from tapas.pins import OTHERS, common, no_batch_split, pin_layout
from tapas.pins import forbid as forbid_factor
from tapas.plans import Plan
from tapas.posing import build_problem
from tapas.problem import Problem, Rows
from tapas.routing import Router
from tapas.search import Answer, solve
from tapas.solution import Solution

Progress = Callable[[str], None]


def _quiet(_: str) -> None:
    pass


@paused
def plan(
    model: Any,
    example_inputs: Any,
    *,
    mesh: Any,
    cluster: str | Cluster = "h100-sxm",
    training: bool | None = None,
    pins: Mapping[str, str] | Sequence[str] | None = None,
    forbid: Mapping[str, str] | Sequence[str] | None = None,
    batch_split: bool = True,
    baselines: bool = True,
    name: str = "",
) -> Plan:
    """The cheapest tensor-parallel plan for a model on a cluster, with proof.

    `example_inputs` is a tuple of positional or a dict of keyword inputs (real, fake or meta tensors);
    `mesh` is a tuple such as (8, 8), a dict such as {"dp": 8, "tp": 8} or a text such as "8x8", outermost
    (slowest) axis first. A model that returns a loss is planned for training, others for inference.
    """
    from tapas.capture import capture

    grid, machine = parse_mesh(mesh), load_cluster(cluster)
    graph = capture(model, example_inputs, training=training, name=name or type(model).__name__)
    return plan_graph(
        graph, grid, machine, pins=_pairs(pins, "pins"), forbid=_pairs(forbid, "forbid"), batch_split=batch_split,
        baselines=NAMES if baselines else (), hints=tp_hints(model),
    )  # fmt: skip


def plan_graph(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    *,
    pins: Sequence[tuple[str, str]] = (),
    forbid: Sequence[tuple[str, str]] = (),
    batch_split: bool = True,
    baselines: Sequence[str] = NAMES,
    hints: Mapping[str, str] | None = None,
    progress: Progress = _quiet,
) -> Plan:
    problem, rows = pose(
        graph, mesh, cluster, pins=pins, forbid=forbid, batch_split=batch_split, hints=hints, progress=progress
    )
    folded = problem.folded
    progress("search")
    solution = search(problem, rows)
    said = restrictions(pins, forbid, batch_split)
    strategies: dict[str, Solution | PlanError] = {}
    for name in baselines:
        if name == "hf" and hints is None:  # a model that is not of transformers has nothing to compare with
            continue
        progress(f"compare with {name}")
        strategies[name] = strategy(problem, name, rows, hints, " or ".join(said))
    for found in strategies.values():  # a search that ends with a gap may have missed what a strategy knows
        if isinstance(found, Solution) and found.answer.cost < solution.answer.cost:
            solution = Solution(problem, replace(found.answer, bound=solution.answer.bound))
    known = {name: comparison(name, found, solution.answer.cost) for name, found in strategies.items()}
    extra = {
        "graph": {
            "operators": folded.operators, "unique": folded.unique_operators, "trimmed": graph.trimmed,
            "parameters": problem.parameters,
        },
        "warnings": tuple(warnings_of(problem, solution.memory(), solution, known)),
        "pins": said,
    }  # fmt: skip
    return assemble(solution, known, **extra)


def pose(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    *,
    pins: Sequence[tuple[str, str]] = (),
    forbid: Sequence[tuple[str, str]] = (),
    batch_split: bool = True,
    apart: Sequence[str] = (),
    hints: Mapping[str, str] | None = None,
    progress: Progress = _quiet,
) -> tuple[Problem, Rows]:
    """The problem and the choices that are left; copies named apart by a pattern become blocks of their own."""
    check_mesh(mesh, cluster)
    progress("fold")
    folded = split(fold(graph), [*(pattern for pattern, _ in (*pins, *forbid)), *apart])
    progress("problem")
    problem = build_problem(folded, Router(mesh, cluster))
    return problem, restricted(problem, pins, forbid, batch_split, hints)


def restrictions(
    pins: Sequence[tuple[str, str]], forbid: Sequence[tuple[str, str]], batch_split: bool = True
) -> tuple[str, ...]:
    """What a user insists on, as it was said: a plan is the best only among those that this leaves."""
    without = () if batch_split else ("--no-batch-split",)
    return (*without, *(f"{a}={b}" for a, b in pins), *(f"--forbid {a}={b}" for a, b in forbid))


def restricted(
    problem: Problem,
    pins: Sequence[tuple[str, str]],
    forbid: Sequence[tuple[str, str]],
    batch_split: bool = True,
    hints: Mapping[str, str] | None = None,
) -> Rows:
    rows: Rows = {} if batch_split else no_batch_split(problem)
    for number, (pattern, what) in enumerate(pins):
        others = " or ".join(restrictions(pins[:number], (), batch_split))
        if what in STRATEGIES:
            rows = pin_strategy(problem, pattern, what, rows, hints, others)
        else:
            _check_word(pattern, what)
            rows = pin_layout(problem, pattern, what, rows, others)
    for number, (pattern, factor) in enumerate(forbid):
        others = " or ".join(restrictions(pins, forbid[:number], batch_split))
        rows = forbid_factor(problem, pattern, factor, rows, others)
    return rows


def _check_word(pattern: str, what: str) -> None:
    """A word that is no layout was meant to be a strategy."""
    if re.fullmatch(r"[A-Za-z][\w-]+", what):
        near = nearest(what, list(NAMES))
        advice = near if near.startswith("known") else f"{near} (known: {', '.join(NAMES)})"
        raise PlanError(
            f"--pin {pattern}={what}", f"there is no strategy {what}", f"{advice}; or give a layout such as [R, S(0)]"
        )


def search(problem: Problem, rows: Rows | None = None) -> Solution:
    """The best choices among those that are left."""
    left = problem.rows(rows)
    answer = solve(problem.network(left))
    if answer.cost == float("inf"):
        raise PlanError("search", "no combination of the choices that are left works", "loosen the pins")
    return Solution(problem, _widened(answer, problem, left))


def _widened(answer: Answer, problem: Problem, rows: Rows) -> Answer:
    """Choice numbers of the restricted tables as those of the full ones."""
    full = {
        (block, own): tuple(int(rows[block, v][i]) if (block, v) in rows else i for v, i in enumerate(own))
        for block, own in {(c.block, o) for c, o in zip(problem.folded.copies, answer.choices, strict=True)}
    }
    choices = tuple(full[c.block, own] for c, own in zip(problem.folded.copies, answer.choices, strict=True))
    return Answer(choices, answer.cost, answer.bound, answer.alike)


def strategy(
    problem: Problem, name: str, rows: Rows, hints: Mapping[str, str] | None = None, others: str = OTHERS
) -> Solution | PlanError:
    """A known strategy at its best on the same problem, user's pins included; or why it cannot be applied."""
    try:
        return search(problem, common(problem, STRATEGIES[name](problem, hints), rows, name, others))
    except PlanError as error:
        return error


def comparison(name: str, found: Solution | PlanError, cost: float) -> dict[str, Any]:
    """A strategy beside a plan of this cost; its own `cost` is None where it cannot be applied."""
    if isinstance(found, PlanError):
        place = found.place.removeprefix(name).lstrip(": ")
        return {"cost": None, "why": f"{place}: {found.fact}" if place else found.fact}
    return {
        "cost": found.answer.cost, "ratio": found.answer.cost / cost if cost else 1.0,
        "seconds": found.seconds(), "memory": sum(found.memory().values()),
    }  # fmt: skip


def tp_hints(model: Any) -> dict[str, str] | None:
    """transformers' own tp_plan of a model, pattern -> style; empty where it brings none, None for other models."""
    if not (hasattr(model, "tp_plan") or hasattr(model, "_tp_plan")):
        return None
    found = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    return {str(k): str(v) for k, v in dict(found).items()} if isinstance(found, Mapping) else {}


def _pairs(given: Mapping[str, str] | Sequence[str] | None, place: str) -> list[tuple[str, str]]:
    """From a dict, or from texts `PATTERN=WHAT`."""
    items = list(given.items()) if isinstance(given, Mapping) else given or ()
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise PlanError(place, f"is a {type(given).__name__}", "give a dict pattern -> what, or texts 'PATTERN=WHAT'")
    pairs = []
    for item in items:
        pair = tuple(item.split("=", 1)) if isinstance(item, str) else item
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(p, str) and p for p in pair)):
            raise PlanError(f"{place} {item}", "is not PATTERN=WHAT", "write e.g. 'model.layers.*.mlp.*=megatron'")
        pairs.append((pair[0], pair[1]))
    return pairs
