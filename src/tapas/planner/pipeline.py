"""The composition: capture -> fold -> problem -> search -> plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tapas.cost.collectives import ClusterRouter
from tapas.cost.optimizers import ADAM, Optimizer
from tapas.errors import PlanError
from tapas.hardware.cluster import Cluster, Mesh, check_mesh, load_cluster, parse_mesh
from tapas.hardware.memory_limit import memory_limit
from tapas.ir.fold import fold
from tapas.ir.graph import Graph
from tapas.ir.split_copies import split
from tapas.plan.plan import Plan
from tapas.planner.axis_use import tensor_warning
from tapas.planner.describe import assemble, warnings_of
from tapas.planner.fit import DoesNotFit, Known, Limits
from tapas.planner.mesh_ranking import quick_plan
from tapas.planner.solution import Solution
from tapas.problem.baselines import NAMES, STRATEGIES
from tapas.problem.build import build_problem
from tapas.problem.pins import OTHERS, common
from tapas.problem.problem import AUTO, Problem, Rows
from tapas.problem.restrictions import restricted, restrictions
from tapas.util import paused

Progress = Callable[[str], None]
MOST_DEVICES = 16_384  # that are tried for a model that does not fit


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
    memory: float | str | None = "device",
    optimizer: str | Optimizer = "adam",
    recompute: str = "auto",
) -> Plan:
    """The cheapest tensor-parallel plan for a model on a cluster, with proof.

    `example_inputs` is a tuple of positional or a dict of keyword inputs (real, fake or meta tensors);
    `mesh` is a tuple such as (8, 8), a dict such as {"dp": 8, "tp": 8} or a text such as "8x8", outermost
    (slowest) axis first. A model that returns a loss is planned for training, others for inference.

    `memory` is what a device has for the plan: bytes, a text such as "40GB", "device" for its own less a reserve,
    or None for no limit. `recompute` says whether blocks compute their activations again in the backward pass
    ("none", "selective", "block"); by default they do so where that is the fastest way to fit.
    """
    from tapas.capture import capture

    grid, machine = parse_mesh(mesh), load_cluster(cluster)
    limit = memory_limit(memory, machine)
    keeps = optimizer if isinstance(optimizer, Optimizer) else Optimizer(optimizer)
    graph = capture(model, example_inputs, training=training, name=name or type(model).__name__)
    return plan_graph(
        graph, grid, machine, pins=_pairs(pins, "pins"), forbid=_pairs(forbid, "forbid"), batch_split=batch_split,
        baselines=NAMES if baselines else (), hints=tp_hints(model), limit=limit, optimizer=keeps, recompute=recompute,
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
    limit: float | None = None,
    optimizer: Optimizer = ADAM,
    recompute: str = AUTO,
    start: Known | None = None,
) -> Plan:
    """The plan; the search may start with one that fits."""
    limits = within(
        graph, mesh, cluster, limit, pins=pins, forbid=forbid, batch_split=batch_split, hints=hints,
        progress=progress, optimizer=optimizer, recompute=recompute,
    )  # fmt: skip
    asked = {"batch_split": batch_split, "hints": hints, "recompute": recompute}
    guess = partial(quick_plan, graph, mesh, cluster, limit, pins=pins, forbid=forbid, optimizer=optimizer, **asked)
    limits = replace(limits, known=start, guess=guess)
    problem = limits.problem
    progress("search")
    try:
        solution = limits.best()
    except DoesNotFit as error:
        raise too_large(error, limits) from None
    said = restrictions(pins, forbid, batch_split, recompute)
    strategies: dict[str, Solution | PlanError] = {}
    for name in baselines:
        if name == "hf" and hints is None:  # a model that is not of transformers has nothing to compare with
            continue
        progress(f"compare with {name}")
        strategies[name] = strategy(limits, name, hints, " or ".join(said))
    for found in strategies.values():  # a search that ends with a gap may have missed what a strategy knows
        if isinstance(found, Solution) and found.answer.cost < solution.answer.cost and limits.fits(found):
            solution = Solution(problem, replace(found.answer, bound=solution.answer.bound))
    known = {name: comparison(name, found, solution.answer.cost) for name, found in strategies.items()}
    return described(solution, graph, limit, said, known)


def described(
    solution: Solution, graph: Graph, limit: float | None, said: tuple[str, ...], known: dict[str, dict[str, Any]]
) -> Plan:
    """A solution as a plan, with what a reader should know about it."""
    problem, folded = solution.problem, solution.problem.folded
    warnings = warnings_of(problem, solution.memory(), solution, known)
    if not said:  # or it is the user who wants it so
        warnings += tensor_warning(problem, solution.answer, known)
    extra = {
        "graph": {
            "operators": folded.operators, "unique": folded.unique_operators, "trimmed": graph.trimmed,
            "parameters": problem.parameters,
        },
        "warnings": tuple(warnings),
        "pins": said,
        "limit": float(limit or 0.0),
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
    optimizer: Optimizer = ADAM,
    recompute: str = AUTO,
) -> tuple[Problem, Rows]:
    """The problem and the choices that are left; copies named apart by a pattern become blocks of their own."""
    check_mesh(mesh, cluster)
    progress("fold")
    folded = split(fold(graph), [*(pattern for pattern, _ in (*pins, *forbid)), *apart])
    progress("problem")
    problem = build_problem(folded, ClusterRouter(mesh, cluster), optimizer)
    return problem, restricted(problem, pins, forbid, batch_split, hints, recompute)


def within(graph: Graph, mesh: Mesh, cluster: Cluster, limit: float | None, **asked: Any) -> Limits:
    """The problem with all that limits its plans; `asked` as for `pose`."""
    problem, rows = pose(graph, mesh, cluster, **asked)
    kept = {key: asked[key] for key in ("batch_split", "hints", "recompute") if key in asked}
    return Limits(
        problem, rows, limit, lambda ends: restricted(ends, asked.get("pins", ()), asked.get("forbid", ()), **kept)
    )


def too_large(error: DoesNotFit, limits: Limits) -> PlanError:
    """The same error with the fewest devices that would do, found by doubling the outermost axis."""
    mesh, cluster = limits.problem.router.mesh, limits.problem.router.cluster
    for times in (2**k for k in range(1, MOST_DEVICES.bit_length())):
        larger = Mesh((times * mesh.sizes[0], *mesh.sizes[1:]), mesh.names)
        if larger.devices > MOST_DEVICES:
            break
        problem = build_problem(limits.problem.folded, ClusterRouter(larger, cluster), limits.problem.optimizer)
        try:
            smallest = replace(limits, problem=problem, rows=limits.restricted(problem)).smallest()
        except PlanError:
            break
        if smallest.nbytes <= error.limit:
            advice = f"use {larger.devices} devices (--mesh {larger}), or a smaller batch (--batch)"
            return PlanError(error.place, error.fact, advice)
    advice = f"up to {MOST_DEVICES:,} devices were tried and do not help: use a smaller batch (--batch) or sequence"
    return PlanError(error.place, error.fact, advice)


def strategy(
    limits: Limits, name: str, hints: Mapping[str, str] | None = None, others: str = OTHERS
) -> Solution | PlanError:
    """A known strategy at its best on the same problem, user's pins included; or why it cannot be applied. One
    that does not fit, whatever is computed again, is shown as it is if nothing is."""

    def further(problem: Problem, rows: Rows) -> Rows:
        return common(problem, STRATEGIES[name](problem, hints), rows, name, others)

    try:
        return limits.best(further, insist=False)
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
