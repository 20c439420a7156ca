"""The composition: capture -> fold -> problem -> search -> plan."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tapas.cost.collectives import ClusterRouter
from tapas.errors import PlanError
from tapas.hardware.cluster_files import cluster_from_dict
from tapas.hardware.mesh import Mesh, factorizations
from tapas.ir.capacity import with_capacity
from tapas.ir.fold import Folded, fold, split_copies
from tapas.ir.graph import Graph
from tapas.plan.assignment import Assignment
from tapas.plan.plan import Plan, mesh_of
from tapas.planner.assignment import assignment_of, followed
from tapas.planner.axis_use import tensor_warning
from tapas.planner.describe import OPTIMAL, assemble, proof_text, warnings_of
from tapas.planner.few_runs import best_with_fewest_runs, with_fewest_runs
from tapas.planner.fit import DoesNotFit, LimitedProblem, WarmStart
from tapas.planner.held_up import held_up
from tapas.planner.mesh_ranking import RankedMesh, best_of, quick_plan, rank_meshes
from tapas.planner.request import Request
from tapas.planner.solution import Solution
from tapas.problem.baselines import OF_TWO_AXES, STRATEGIES, several_axes
from tapas.problem.build import build_problem
from tapas.problem.pins import common
from tapas.problem.problem import Problem, Rows
from tapas.rules.found import with_findings
from tapas.search import LogEntry, Monitor
from tapas.util import Progress, paused, silent

SEARCH = "search"  # the stage
MOST_DEVICES = 16_384  # that are tried for a model that does not fit
Hints = Mapping[str, str]  # see tp_hints


@paused
def plan_model(model: Any, example_inputs: Any, request: Request, name: str = "") -> Plan:
    from tapas.capture import capture

    name = name or type(model).__name__
    graph = capture(model, example_inputs, training=request.training, name=name, losses=request.losses)
    return plan_graph(graph, request, tp_hints(model))


@paused
def plan_graph(
    graph: Graph,
    request: Request,
    hints: Hints | None = None,
    *,
    progress: Progress = silent,
    start: WarmStart | None = None,
) -> Plan:
    """The plan; the search may start with one that fits."""
    limits = within(graph, request, hints, progress)
    limits = replace(limits, start=start, guess=partial(quick_plan, graph, request, hints))
    progress(SEARCH)
    with Monitor(request.time_limit, lambda entry: progress(f"{SEARCH}: {so_far(entry)}")) as monitor:
        try:
            solution = limits.best()
        except DoesNotFit as error:
            raise error if error.stopped else too_large(error, limits) from None
        said = stopped_early(monitor, solution)
        monitor.show = lambda entry: None  # of the plan it has shown all
        strategies = compared(limits, request, hints, monitor, progress)
    for found in strategies.values():  # a search that ends with a gap may have missed what a strategy knows
        if isinstance(found, Solution) and found.answer.cost < solution.answer.cost and limits.fits(found):
            solution = Solution(limits.problem, replace(found.answer, bound=solution.answer.bound))
    simplified = with_fewest_runs(limits, solution)
    cost = simplified.solution.answer.cost
    known = {name: comparison(name, found, cost) for name, found in strategies.items()}
    plan = described(simplified.solution, graph, request, known, said, simplified.said)
    fitting = {name: found for name, found in strategies.items() if isinstance(found, Solution) and limits.fits(found)}
    return replace(plan, warnings=(*plan.warnings, *held_up(plan, fitting)))


def compared(
    limits: LimitedProblem, request: Request, hints: Hints | None, monitor: Monitor, progress: Progress
) -> dict[str, Solution | PlanError]:
    """The strategies at their best, as far as there is time."""
    strategies: dict[str, Solution | PlanError] = {}
    for name in request.baselines:
        if name == "hf" and hints is None:  # a model that is not of transformers has nothing to compare with
            continue
        if name in OF_TWO_AXES and not several_axes(limits.problem):
            continue
        progress(f"compare with {name}")
        if not monitor.stopped:
            strategies[name] = strategy(limits, name)
        if monitor.stopped:
            strategies[name] = PlanError(name, f"not searched to the end ({monitor.why})", "give more time")
    return strategies


def so_far(entry: LogEntry) -> str:
    """Where a search stands, for people."""
    if entry.cost == float("inf"):
        return f"no plan yet, none takes less than {entry.bound:.4g} s a step"
    return f"{entry.cost:.4g} s a step, at most {entry.gap:.2%} from the best"


def stopped_early(monitor: Monitor, solution: Solution) -> list[str]:
    """What a plan says whose search did not come to its end."""
    if not monitor.stopped or proof_text(solution.answer.cost, solution.answer.bound) == OPTIMAL:
        return []
    after = f"the search was stopped after {monitor.seconds:.2g} s ({monitor.why})"
    return [f"{after}: this is the best plan by then, with more time there may be a faster one"]


@paused
def plan_devices(
    graph: Graph, request: Request, devices: int, hints: Hints | None = None, progress: Progress = silent
) -> tuple[list[RankedMesh], Plan]:
    """All meshes of so many devices, ranked, and the plan for the best of them; the mesh of the request does not
    matter."""
    rows = rank_meshes(graph, factorizations(devices), request, hints, progress)
    best = best_of(rows)
    return rows, plan_graph(graph, replace(request, mesh=best.mesh), hints, progress=progress, start=best.start)


def described(
    solution: Solution, graph: Graph, request: Request, baselines: Mapping[str, Mapping[str, Any]] | None = None,
    stopped: Sequence[str] = (), faster: Mapping[str, float] | None = None,
) -> Plan:  # fmt: skip
    """A solution as a plan, with what a reader should know about it; first of all why its search was `stopped`."""
    problem, folded, known = (
        solution.problem,
        solution.problem.folded,
        {k: dict(v) for k, v in (baselines or {}).items()},
    )
    said = request.constraints().texts
    warnings = [*stopped, *graph.notes, *warnings_of(problem, solution.memory(), solution, known)]
    if not said:  # or it is the user who wants it so
        warnings += tensor_warning(problem, solution.answer, known)
    extra = {
        "graph": {
            "operators": folded.operators, "unique": folded.unique_operators, "trimmed": graph.trimmed,
            "parameters": problem.parameters,
        },
        "warnings": tuple(warnings),
        "pins": (
            *said,
            *([f"--pieces {request.pieces}"] if request.pieces > 1 else []),
            *([f"--capacity {request.capacity:g}"] if request.capacity is not None else []),
        ),
        "limit": float(request.limit or 0.0),
        "source": request.to_dict(), "faster": dict(faster or {}),
    }  # fmt: skip
    return assemble(solution, known, request.pieces, **extra)


def pose(
    graph: Graph, request: Request, hints: Hints | None = None, progress: Progress = silent, apart: Sequence[str] = ()
) -> tuple[Problem, Rows]:
    """The problem and the choices that are left; copies named apart by a pattern become blocks of their own."""
    constraints = request.constraints(hints)
    progress("fold")
    graph = with_capacity(with_findings(graph, request.discovery, progress), request.capacity)
    folded = split_copies(fold(graph), [*constraints.patterns, *apart])
    progress("problem")
    problem = build_problem(folded, request.router(), request.optimizer)
    return problem, constraints.rows(problem)


def within(
    graph: Graph, request: Request, hints: Hints | None = None, progress: Progress = silent, apart: Sequence[str] = ()
) -> LimitedProblem:
    """The problem with all that limits its plans."""
    problem, rows = pose(graph, request, hints, progress, apart)
    return LimitedProblem(problem, rows, request.limit, request.constraints(hints))


def decided(
    graph: Graph, folded: Folded, asked: Request | Plan, hints: Hints | None = None, progress: Progress = silent
) -> Assignment:
    """The decisions of a plan on a graph, or the best ones for a request."""
    if isinstance(asked, Plan):
        progress("follow the plan")
        return followed(asked, graph, folded)
    limits = within(graph, asked, hints, progress)
    progress(SEARCH)
    return assignment_of(best_with_fewest_runs(limits).solution, asked.pieces)


def router_of(asked: Request | Plan) -> ClusterRouter:
    """The mesh that was asked for, or planned for, at the prices of its cluster."""
    if isinstance(asked, Plan):
        passes, compiled = asked.source.get("accumulate", 1), asked.source.get("compile", False)
        return ClusterRouter(mesh_of(asked), cluster_from_dict(asked.cluster), passes, compiled)
    return asked.router()


def too_large(error: DoesNotFit, limits: LimitedProblem) -> PlanError:
    """The same error with the fewest devices that would do, found by doubling the outermost axis."""
    router = limits.problem.router
    mesh, cluster = router.mesh, router.cluster
    for times in (2**k for k in range(1, MOST_DEVICES.bit_length())):
        larger = Mesh((times * mesh.sizes[0], *mesh.sizes[1:]), mesh.names)
        if larger.devices > MOST_DEVICES:
            break
        problem = build_problem(
            limits.problem.folded,
            ClusterRouter(larger, cluster, router.passes, router.compiled),
            limits.problem.optimizer,
        )
        try:
            smallest = replace(limits, problem=problem, rows=limits.constraints.rows(problem)).smallest()
        except PlanError:
            break
        if smallest.nbytes <= error.limit:
            advice = f"use {larger.devices} devices (--mesh {larger}), or a smaller batch (--batch)"
            return PlanError(error.place, error.fact, advice)
    advice = f"up to {MOST_DEVICES:,} devices were tried and do not help: use a smaller batch (--batch) or sequence"
    return PlanError(error.place, error.fact, advice)


def strategy(limits: LimitedProblem, name: str) -> Solution | PlanError:
    """A known strategy at its best on the same problem, user's pins included; or why it cannot be applied. One
    that does not fit, whatever is computed again, is shown as it is if nothing is."""
    constraints = limits.constraints

    def further(problem: Problem, rows: Rows) -> Rows:
        others = " or ".join(constraints.texts)
        return common(problem, STRATEGIES[name](problem, constraints.hints), rows, name, others)

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
