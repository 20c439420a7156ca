"""The trade-off between step time and memory: the fastest plans for limits from the least that a plan is known to
need to what the fastest plan of all needs.

Where to look next is decided by what the curve may still do: between two neighbours it can be anywhere in the
rectangle that they span. The largest one is halved, until enough plans are there or little is left to find. The
searches share what they find out, and each does little work: a point is a plan with its own bound, not a proof.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, log
from pathlib import Path
from typing import Any

from tapas.errors import PlanError
from tapas.hardware.cluster import device_limit
from tapas.ir.graph import Graph
from tapas.plan.plan import Plan
from tapas.planner.fit import DoesNotFit, LimitedProblem, LimitedSearch, search
from tapas.planner.pipeline import described, within
from tapas.planner.request import Request
from tapas.planner.solution import Solution
from tapas.problem.problem import WeightVariable
from tapas.search import Choices, SearchAnswer, cost_of
from tapas.util import Progress, paused, silent

WORK = 20_000  # of a search, see solve_within: most of a second; a hundred times as much rarely finds 1 % more
CLOSE = 1e-9  # relative: plans whose step times differ by less are equally fast
LITTLE = 1e-3  # of the rectangle that both ends span: where it does not pay to look
LOOSE, GAP = 0.1, 0.01  # relative: a plan is far below its limit, and its gap worth another search
SEARCHES = 2  # for each point that is asked for: some find nothing new
DECIMALS = 9  # of file names, at most: those of bytes in GB


# ------------------------------------------------------------------------------------------ the curve


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    plan: Plan
    stored: float  # the part of all weights that each device stores
    knee: bool  # a vertex of the lower convex hull: no mixture of two other points is below it

    @property
    def nbytes(self) -> int:
        return sum(self.plan.memory.values())

    @property
    def seconds(self) -> float:
        return self.plan.cost

    @property
    def gap(self) -> float:
        """Relative: how much faster a plan of this memory might be, at most."""
        return self.plan.gap / self.plan.cost if self.plan.cost else 0.0

    def recomputed(self, mode: str) -> int:
        return sum(b.copies for b in self.plan.blocks if b.paths and b.recompute == mode)

    @property
    def blocks(self) -> int:
        return sum(b.copies for b in self.plan.blocks if b.paths)


@dataclass(frozen=True, slots=True)
class Frontier:
    points: tuple[FrontierPoint, ...]  # from the most frugal to the fastest
    usable: float  # bytes of a device that a plan may use

    def slower(self, point: FrontierPoint) -> float:
        """Than the fastest, relative."""
        fastest = self.points[-1].seconds
        return point.seconds / fastest - 1 if fastest else 0.0

    def fits(self, point: FrontierPoint) -> bool:
        return point.nbytes <= self.usable

    @property
    def fitting(self) -> FrontierPoint | None:
        """The fastest that fits."""
        return next((point for point in reversed(self.points) if self.fits(point)), None)

    @property
    def files(self) -> dict[str, FrontierPoint]:
        """The plans at the knees, and the fastest that fits, by the names of their files, which sort by memory."""
        kept = [point for point in self.points if point.knee or point is self.fitting]
        return dict(zip(file_names([point.nbytes for point in kept]), kept, strict=True))

    def keeping(self, change: Callable[[Plan], Plan]) -> "Frontier":
        """With every plan changed."""
        return replace(self, points=tuple(replace(point, plan=change(point.plan)) for point in self.points))

    def save(self, folder: Path) -> None:
        check_folder(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlanError(str(folder), f"cannot be made: {error.strerror}", "write elsewhere") from None
        for name, point in self.files.items():
            point.plan.save(folder / name)

    def to_dict(self) -> dict[str, Any]:
        first = self.points[0].plan
        names = {id(point): name for name, point in self.files.items()}
        points = [self._point(point, names.get(id(point))) for point in self.points]
        return {
            "model": first.model, "mesh": first.mesh, "cluster": first.cluster, "training": first.training,
            "inputs": first.inputs, "pins": list(first.pins), "usable_bytes": self.usable, "points": points,
        }  # fmt: skip

    def _point(self, point: FrontierPoint, file: str | None) -> dict[str, Any]:
        return {
            "memory": point.nbytes, "seconds": point.seconds, "slower": self.slower(point),
            "bound": point.plan.bound, "gap": point.gap, "limit": point.plan.limit or None, "knee": point.knee,
            "fits": self.fits(point), "file": file, "kinds": point.plan.memory, "stored": point.stored,
            "recompute": {
                "blocks": point.blocks, "block": point.recomputed("block"), "selective": point.recomputed("selective"),
            },
        }  # fmt: skip


def frontier_of(plans: Sequence[tuple[Plan, float]], usable: float) -> Frontier:
    """From plans that are sorted by memory, and the part of the weights that a device stores."""
    corners = set(knees([(sum(plan.memory.values()), plan.cost) for plan, _ in plans]))
    return Frontier(tuple(FrontierPoint(*pair, number in corners) for number, pair in enumerate(plans)), usable)


def knees(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which of these points, sorted by their first number, are the vertices of their lower convex hull."""
    hull: list[int] = []
    for number, (x, y) in enumerate(points):
        while len(hull) > 1:
            (x0, y0), (x1, y1) = points[hull[-2]], points[hull[-1]]
            if (x1 - x0) * (y - y0) > (y1 - y0) * (x - x0):
                break
            hull.pop()
        hull.append(number)
    return hull


def file_names(sizes: Sequence[int]) -> list[str]:
    """`plan-040GB.json`: as many decimals as tell them apart."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if max(sizes) >= u), (1.0, "B"))
    digits = max(3, len(str(int(max(sizes) / unit))))
    for decimals in range(DECIMALS + 1):
        width = digits + (decimals + 1 if decimals else 0)
        names = [f"plan-{size / unit:0{width}.{decimals}f}{name}.json" for size in sizes]
        if len({*names}) == len(names):
            return names
    raise AssertionError("two plans of the same size")  # one of them would have been dropped


def check_folder(folder: Path) -> None:
    """Refuse a folder that has something in it, or cannot be made, before any work is done for it."""
    if folder.is_dir():
        if any(folder.iterdir()):
            raise PlanError(str(folder), "is not empty", "give a new folder, or an empty one")
        base = folder
    elif folder.exists():
        raise PlanError(str(folder), "is a file", "give a folder for the plans")
    else:
        base = next(parent for parent in folder.absolute().parents if parent.exists())
    if not base.is_dir() or not os.access(base, os.W_OK):
        raise PlanError(str(folder), f"{base} cannot be written to", "write elsewhere")


# ------------------------------------------------------------------------------------------ the search


@paused
def plan_frontier(
    graph: Graph,
    request: Request,
    points: int,
    hints: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> Frontier:
    """Plans from the most frugal to the fastest, whatever the memory limit of the request."""
    free, usable = replace(request, memory=None), device_limit(request.cluster)
    plans = []
    for point in frontier_solutions(within(graph, free, hints, progress), points, [usable], progress):
        within_limit = replace(free, memory=point.limit)
        plans.append((described(point.solution, graph, within_limit), point.stored))
    return frontier_of(plans, usable)


@dataclass(frozen=True, slots=True)
class FrontierSolution:
    """A plan, and the limit that it was found for (None: there was none)."""

    solution: Solution
    limit: float | None

    @property
    def nbytes(self) -> int:
        return self.solution.peak.nbytes

    @property
    def stored(self) -> float:
        """The part of all weights that each device stores."""
        held = whole = 0.0
        for group in self.solution.groups():
            for variable, choice in zip(self.solution.part(group).variables, group.choices, strict=False):
                if isinstance(variable, WeightVariable):
                    times = len(group.copies) * variable.space.itemsize
                    held += times * float(variable.space.elements[variable.stored[choice]])
                    whole += times * variable.tensor.elements
        return held / whole if whole else 1.0


def frontier_solutions(
    limits: LimitedProblem, points: int, also: Sequence[float], progress: Progress
) -> list[FrontierSolution]:
    """Plans from the most frugal to the fastest, none of them both slower and larger than another. Limits in
    `also` are looked at first where they lie between the ends."""
    progress("search")
    fastest = search(limits.problem, limits.rows)
    tradeoff = _FrontierSearch(limits.fitting(work=WORK), fastest)
    smallest, largest = tradeoff.fitting.smallest[0].nbytes, tradeoff.visited[()].nbytes
    if smallest < largest:
        progress("search for the most frugal plan")
        tradeoff.look(smallest)
    wanted = [limit for limit in also if smallest < limit < largest]
    for _ in range(SEARCHES * points):
        limit = wanted.pop(0) if wanted else tradeoff.next()
        if limit is None or len(tradeoff.points()) >= points:
            break
        progress(f"search within {limit / 1e9:.3g} GB")
        tradeoff.look(limit)
    for limit in tradeoff.loosely_bounded():
        progress(f"prove what {limit / 1e9:.3g} GB allow")
        tradeoff.look(limit)
    return tradeoff.points()


@dataclass(frozen=True, slots=True)
class VisitedPlan:
    """A plan that some search came across."""

    choices: Choices  # of the whole problem
    cost: float
    nbytes: int  # that it has to have room for


@dataclass
class _FrontierSearch:
    fitting: LimitedSearch
    fastest: Solution
    bounds: dict[float, float] = field(default_factory=dict)  # limit -> no plan within it is faster
    visited: dict[Choices, VisitedPlan] = field(default_factory=dict)  # by the choices as the search counts them

    def __post_init__(self) -> None:
        answer = self.fastest.answer
        self.bounds[inf] = answer.bound
        self.visited[()] = self.visit(answer.choices, answer.cost)

    def visit(self, choices: Choices, cost: float) -> VisitedPlan:
        return VisitedPlan(choices, cost, self.fitting.memory.needed(choices, self.fitting.families).nbytes)

    def look(self, limit: float) -> None:
        try:
            self.bounds[limit] = self.fitting.within(limit, self.fastest.peak.moment).bound
        except DoesNotFit:  # with so little work; a plan that was seen may fit all the same
            self.bounds[limit] = 0.0
        for choices in self.fitting.evaluated.keys() - self.visited.keys():
            whole = self.fitting.problem.widened(choices, self.fitting.rows)
            self.visited[choices] = self.visit(whole, cost_of(self.fitting.network, choices))

    def best(self, limit: float) -> VisitedPlan | None:
        """The fastest plan known within a limit; of equally fast ones the smallest."""
        fitting = [plan for plan in self.visited.values() if plan.nbytes <= limit and plan.cost < inf]
        least = min((k.cost for k in fitting), default=inf)
        good = [k for k in fitting if k.cost <= least * (1 + CLOSE)]
        return min(good, key=lambda k: (k.nbytes, k.cost, k.choices), default=None)

    def best_by_limit(self) -> list[tuple[float, VisitedPlan]]:
        """Limits with the best plan known, from low to high; plans that need less than an earlier search allowed
        are that search's, too."""
        return [(limit, best) for limit in sorted(self.bounds) if (best := self.best(limit)) is not None]

    def next(self) -> float | None:
        """The limit to look at, in the middle of the largest rectangle. Step times count by their ratio: a plan
        that takes ten times as long is not of more interest than all others."""
        points = self.best_by_limit()
        (_, frugal), (_, fastest) = points[0], points[-1]
        whole = (fastest.nbytes - frugal.nbytes) * log(frugal.cost / fastest.cost) if fastest.cost else 0.0
        areas = [
            ((b.nbytes - limit) * log(a.cost / b.cost), (limit + b.nbytes) / 2)
            for (limit, a), (_, b) in pairwise(points)
            if limit < b.nbytes and b.cost < a.cost
        ]
        area, middle = max(areas, default=(0.0, 0.0))
        return middle if area > LITTLE * whole else None

    def loosely_bounded(self) -> list[float]:
        """What plans need that are far below their limits: the bounds of these say little about them."""
        best = {known.choices: (limit, known) for limit, known in reversed(self.best_by_limit()) if limit < inf}
        gaps = [
            (limit - known.nbytes, 1 - self.bounds[limit] / known.cost, known.nbytes) for limit, known in best.values()
        ]
        return sorted(float(nbytes) for below, gap, nbytes in gaps if below > LOOSE * nbytes and gap > GAP)

    def points(self) -> list[FrontierSolution]:
        found: dict[Choices, FrontierSolution] = {}
        for limit, known in self.best_by_limit():
            if known.choices not in found:  # the lowest of the limits that it is best for: its bound says most
                bound = max(b for at, b in self.bounds.items() if at >= limit)
                answer = SearchAnswer(known.choices, known.cost, min(bound, known.cost), False)
                point = FrontierSolution(Solution(self.fastest.problem, answer), None if limit == inf else limit)
                # what has to have room and the peak may differ a little, see MemoryModel.needed
                found = {c: p for c, p in found.items() if p.nbytes < point.nbytes}
                found[known.choices] = point
        return list(found.values())
