"""The trade-off between step time and memory: the fastest plans for limits from the least that a plan is known to
need to what the fastest plan of all needs.

Where to look next is decided by what the curve may still do: between two neighbours it can be anywhere in the
rectangle that they span. The largest one is halved, until enough plans are there or little is left to find. The
searches share what they find out, and each does little work: a point is a plan with its own bound, not a proof.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, log

from tapas.planner.fit import DoesNotFit, Fitting, Limits, search
from tapas.planner.solution import Solution
from tapas.problem.problem import WeightVariable
from tapas.search import Choices, SearchAnswer, cost_of

WORK = 20_000  # of a search, see solve_within: most of a second; a hundred times as much rarely finds 1 % more
CLOSE = 1e-9  # relative: plans whose step times differ by less are equally fast
LITTLE = 1e-3  # of the rectangle that both ends span: where it does not pay to look
LOOSE, GAP = 0.1, 0.01  # relative: a plan is far below its limit, and its gap worth another search
SEARCHES = 2  # for each point that is asked for: some find nothing new

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Point:
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


def frontier(limits: Limits, points: int, also: Sequence[float], progress: Progress) -> list[Point]:
    """Plans from the most frugal to the fastest, none of them both slower and larger than another. Limits in
    `also` are looked at first where they lie between the ends."""
    progress("search")
    fastest = search(limits.problem, limits.rows)
    curve = _Curve(limits.fitting(work=WORK), fastest)
    smallest, largest = curve.fitting.smallest[0].nbytes, curve.known[()].nbytes
    if smallest < largest:
        progress("search for the most frugal plan")
        curve.look(smallest)
    wanted = [limit for limit in also if smallest < limit < largest]
    for _ in range(SEARCHES * points):
        limit = wanted.pop(0) if wanted else curve.next()
        if limit is None or len(curve.points()) >= points:
            break
        progress(f"search within {limit / 1e9:.3g} GB")
        curve.look(limit)
    for limit in curve.loose():
        progress(f"prove what {limit / 1e9:.3g} GB allow")
        curve.look(limit)
    return curve.points()


@dataclass(frozen=True)
class _Known:
    """A plan that some search came across."""

    choices: Choices  # of the whole problem
    cost: float
    nbytes: int  # that it has to have room for


@dataclass
class _Curve:
    fitting: Fitting
    fastest: Solution
    bounds: dict[float, float] = field(default_factory=dict)  # limit -> no plan within it is faster
    known: dict[Choices, _Known] = field(default_factory=dict)  # by the choices as the search counts them

    def __post_init__(self) -> None:
        answer = self.fastest.answer
        self.bounds[inf] = answer.bound
        self.known[()] = self.met(answer.choices, answer.cost)

    def met(self, choices: Choices, cost: float) -> _Known:
        return _Known(choices, cost, self.fitting.memory.needed(choices, self.fitting.families).nbytes)

    def look(self, limit: float) -> None:
        try:
            self.bounds[limit] = self.fitting.within(limit, self.fastest.peak.moment).bound
        except DoesNotFit:  # with so little work; a plan that was seen may fit all the same
            self.bounds[limit] = 0.0
        for choices in self.fitting.seen.keys() - self.known.keys():
            whole = self.fitting.problem.widened(choices, self.fitting.rows)
            self.known[choices] = self.met(whole, cost_of(self.fitting.network, choices))

    def best(self, limit: float) -> _Known | None:
        """The fastest plan known within a limit; of equally fast ones the smallest."""
        fitting = [k for k in self.known.values() if k.nbytes <= limit and k.cost < inf]
        least = min((k.cost for k in fitting), default=inf)
        good = [k for k in fitting if k.cost <= least * (1 + CLOSE)]
        return min(good, key=lambda k: (k.nbytes, k.cost, k.choices), default=None)

    def tried(self) -> list[tuple[float, _Known]]:
        """Limits with the best plan known, from low to high; plans that need less than an earlier search allowed
        are that search's, too."""
        return [(limit, best) for limit in sorted(self.bounds) if (best := self.best(limit)) is not None]

    def next(self) -> float | None:
        """The limit to look at, in the middle of the largest rectangle. Step times count by their ratio: a plan
        that takes ten times as long is not of more interest than all others."""
        tried = self.tried()
        (_, frugal), (_, fastest) = tried[0], tried[-1]
        whole = (fastest.nbytes - frugal.nbytes) * log(frugal.cost / fastest.cost) if fastest.cost else 0.0
        areas = [
            ((b.nbytes - limit) * log(a.cost / b.cost), (limit + b.nbytes) / 2)
            for (limit, a), (_, b) in pairwise(tried)
            if limit < b.nbytes and b.cost < a.cost
        ]
        area, middle = max(areas, default=(0.0, 0.0))
        return middle if area > LITTLE * whole else None

    def loose(self) -> list[float]:
        """What plans need that are far below their limits: the bounds of these say little about them."""
        best = {known.choices: (limit, known) for limit, known in reversed(self.tried()) if limit < inf}
        gaps = [
            (limit - known.nbytes, 1 - self.bounds[limit] / known.cost, known.nbytes) for limit, known in best.values()
        ]
        return sorted(float(nbytes) for below, gap, nbytes in gaps if below > LOOSE * nbytes and gap > GAP)

    def points(self) -> list[Point]:
        found: dict[Choices, Point] = {}
        for limit, known in self.tried():
            if known.choices not in found:  # the lowest of the limits that it is best for: its bound says most
                bound = max(b for at, b in self.bounds.items() if at >= limit)
                answer = SearchAnswer(known.choices, known.cost, min(bound, known.cost), False)
                point = Point(Solution(self.fastest.problem, answer), None if limit == inf else limit)
                # what has to have room and the peak may differ a little, see Memory.needed
                found = {c: p for c, p in found.items() if p.nbytes < point.nbytes}
                found[known.choices] = point
        return list(found.values())
