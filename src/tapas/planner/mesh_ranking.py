"""All meshes of a number of devices, ranked by the best plan that is found for each.

The folded graph is the same for all, and so are its calls. Two simple meshes are looked at with all options (the
second one, where memory is short, with those that are known by then along its outer axis); the others only with those
that plans of these two make use of (see candidates.py), and without a proof. The best mesh is then planned in full.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from tapas.errors import PlanError
from tapas.hardware.cluster import Cluster
from tapas.hardware.mesh import Mesh
from tapas.ir.capacity import with_capacity
from tapas.ir.fold import Folded, fold, split_copies
from tapas.ir.graph import Graph
from tapas.planner.axis_use import axis_words
from tapas.planner.candidates import Candidates
from tapas.planner.coarse_search import PriceHint, coarse_plan
from tapas.planner.fit import WarmStart, families
from tapas.planner.request import Request
from tapas.planner.tied_plans import TiedPlans
from tapas.problem.build import build_problem
from tapas.problem.graph_rules import GraphRules
from tapas.problem.problem import Problem, Rows
from tapas.problem.restrictions import Constraints
from tapas.rules.found import with_findings
from tapas.util import Progress, silent


@dataclass(frozen=True, slots=True)
class RankedMesh:
    mesh: Mesh
    cost: float | None  # seconds per step; None where no plan fits or works
    nbytes: float | None  # of a device's memory; where no plan fits, what the smallest one needs
    axes: tuple[str, ...] = ()  # what each of them does
    why: str = ""  # there is no plan
    start: WarmStart | None = None  # the plan itself

    def to_dict(self) -> dict[str, Any]:
        return {
            "mesh": {"names": list(self.mesh.names), "sizes": list(self.mesh.sizes)}, "cost": self.cost,
            "memory": self.nbytes, "axes": list(self.axes), "why": self.why,
        }  # fmt: skip


def rank_meshes(
    graph: Graph,
    meshes: Sequence[Mesh],
    request: Request,
    hints: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> list[RankedMesh]:
    """The meshes, best first; at the end those without a plan, the one that needs least memory first. The mesh of
    the request does not matter."""
    progress("fold")
    constraints = request.constraints(hints)
    graph = with_capacity(with_findings(graph, request.discovery, progress), request.capacity)
    folded = split_copies(fold(graph), constraints.patterns)
    ranking = _MeshRanking(folded, request, constraints)
    rows = [ranking.row(mesh, progress) for mesh in seeds(meshes, request.cluster)]
    ranking.candidates_known = True
    done = {row.mesh for row in rows}
    rows += [ranking.row(mesh, progress) for mesh in meshes if mesh not in done]
    inf = float("inf")

    def place(row: RankedMesh) -> tuple:
        return row.cost if row.cost is not None else inf, row.nbytes or inf, len(row.mesh.sizes), row.mesh.sizes

    return sorted(rows, key=place)


def quick_plan(graph: Graph, request: Request, hints: Mapping[str, str] | None = None) -> WarmStart | None:
    """A good plan for one mesh, with the options that plans of simpler meshes use."""
    mesh = request.mesh
    simpler = [Mesh((mesh.devices,)), Mesh((mesh.devices // mesh.sizes[-1], mesh.sizes[-1]))]
    rows = rank_meshes(graph, [*simpler[: len(mesh.sizes) - 1], mesh], request, hints)
    return next(row.start for row in rows if row.mesh == mesh)


def best_of(rows: Sequence[RankedMesh]) -> RankedMesh:
    """The first, which has to have a plan."""
    best = rows[0]
    if best.cost is not None:
        return best
    many = f"any of the {len(rows)} meshes" if len(rows) > 1 else f"mesh {best.mesh}"
    if best.nbytes is None:
        raise PlanError(f"{best.mesh.devices} devices", f"no plan works on {many}: {best.why}", "loosen the pins")
    fact = f"no plan fits on {many}: the smallest needs {best.nbytes / 1e9:.4g} GB per device, on {best.mesh}"
    raise PlanError(f"{best.mesh.devices} devices", fact, "use more devices, or a smaller batch (--batch)")


def seeds(meshes: Sequence[Mesh], cluster: Cluster) -> list[Mesh]:
    """Simple meshes that are unlike each other: one axis, and nodes times devices in them (or the nearest to that)."""
    one = [mesh for mesh in meshes if len(mesh.sizes) == 1]
    two = [mesh for mesh in meshes if len(mesh.sizes) == 2]
    if not (one and two):
        return one or list(meshes[:1])
    devices = two[0].devices
    inner = cluster.per_node if devices > cluster.per_node else isqrt(devices)
    return [one[0], min(two, key=lambda mesh: abs(mesh.sizes[1] - inner))]


@dataclass
class _MeshRanking:
    folded: Folded
    request: Request
    constraints: Constraints
    hint: PriceHint | None = None
    candidates_known: bool = False  # there are candidates

    def __post_init__(self) -> None:
        self.candidates = Candidates()
        self.calls = GraphRules(self.folded, self.request.compile)
        self.families = families(self.folded)

    def row(self, mesh: Mesh, progress: Progress) -> RankedMesh:
        progress(f"mesh {mesh}")
        limit = self.request.limit
        try:
            tied = self.problem(mesh)
            best = coarse_plan(tied, limit, self.hint)
        except PlanError as error:
            return RankedMesh(mesh, None, None, why=f"{error.place}: {error.fact}")
        problem = tied.problem
        if not self.candidates_known:
            for choices in best.visited:
                self.candidates.note(problem, choices)
        self.hint = best.hint or self.hint
        if limit is not None and not best.fits:
            return RankedMesh(mesh, None, best.peak.nbytes, why=f"does not fit into {limit / 1e9:.4g} GB")
        words = tuple(axis_words(problem, best.choices))
        price = best.hint.price if best.hint else 0.0
        return RankedMesh(mesh, best.cost, best.peak.nbytes, words, start=WarmStart(problem, best.choices, price))

    def problem(self, mesh: Mesh) -> TiedPlans:
        router = self.request.router(mesh)
        if self.candidates_known:
            problem = build_problem(self.calls, router, self.request.optimizer, self.candidates.wanted)
            try:
                return self.tied(problem, self.constraints.rows(problem))
            except PlanError:  # what is insisted on here may be no candidate
                pass
        problem = build_problem(self.calls, router, self.request.optimizer)
        rows = self.constraints.rows(problem)
        if self.candidates.used and not self.candidates_known:
            fast = self.tied(problem, problem.rows(rows))
            self.candidates.note(problem, fast.wide(fast.best([0.0], [])[0][1]))
            rows = self.candidates.outside(problem, rows)
        return self.tied(problem, rows)

    def tied(self, problem: Problem, rows: Rows) -> TiedPlans:
        return TiedPlans(problem, rows, self.families)
