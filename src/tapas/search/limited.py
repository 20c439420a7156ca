"""The cheapest plan that keeps within limits: prices for what is limited, then all that the prices leave open.

Any prices give a lower bound for all plans within the limits. The best ones rarely give a plan that uses a limit
up, as copies of a block switch all at once; so the choices of the plans met on the way are mixed freely, exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tapas.search.folded import BUDGETS, SearchAnswer, copies_alike, solve
from tapas.search.marginals import possible
from tapas.search.measures import Load, MultiObjectiveNetwork, multi_objective
from tapas.search.mixing import Goal
from tapas.search.mixtures import Found, mixture_of_points, mixture_of_rows
from tapas.search.network import Choices, Network, cost_of
from tapas.search.outcome import EvaluatedChoices, LeastOvershoot, LimitedAnswer
from tapas.search.points import Cut
from tapas.search.prices import Master, best_prices, worst_mix
from tapas.search.restrict import Own, agreed, original

SOLVES = 6  # searches with prices for each load, and for one more
HIGHEST = 1e5  # price, in units: what a whole limit may cost in whole plans
SLACK = 1e-10  # relative: what rounding may do to amounts
NEARER = 0.5  # part of the way to the prices that look best, where those before did not prove more
WORK = 1_000_000  # points that are compared with one load: seconds; fewer with more loads, as they take longer
AROUND = 0.3  # relative: prices are looked at this far from the best ones
LITTLE = 50_000  # work that is not enough to look at more than what plans seen do
SHARES = 8  # the part of it for a first attempt, one in so many
CLOSE = 1e-7  # relative: plans whose costs differ by less are equally good


def solve_within(
    network: Network, loads: Sequence[Load], prices: Sequence[float] = (), seen: Sequence[EvaluatedChoices] = (),
    solves: int | None = None, budgets: Sequence[int] = BUDGETS, work: int | None = None,
) -> LimitedAnswer:  # fmt: skip
    """The cheapest plan whose amounts are within the limits. Prices and plans of an earlier search, with fewer
    loads or other limits, make for a good start."""
    work = WORK // max(len(loads), 1) ** 2 if work is None else work
    search = _Search(network, loads, budgets, work)
    solves = SOLVES * (1 + len(loads)) if solves is None else solves
    for plan in seen:
        search.meet(plan.choices)
    if not search.plans:
        free = solve(network, budgets)
        if free.cost == np.inf:
            return LimitedAnswer(None, None, (0.0,) * len(loads), (), None, free.bound == np.inf)
        search.start(free)
        if search.best is not None:
            seen = tuple(search.plans.values())
            return LimitedAnswer(free, seen[0].amounts, (0.0,) * len(loads), seen, None, False)
    search.ascend([*prices, *[0.0] * (len(loads) - len(prices))], solves)
    if search.best is None:
        search.approach(solves)
    if search.best is not None and not search.proven:
        search.narrow_down(search.part, search.better, Goal(search.limits, CLOSE / 4 * abs(search.bound)))
    return search.result()


@dataclass(frozen=True)
class _Aim:
    """What is looked for: a plan within the cuts. What is known: its value is below that of the best plan so far."""

    cuts: Sequence[Cut]
    done: bool
    value: float
    most: float  # that a better plan's value is
    learn: Callable[[float], None]  # by how much plans that were not looked at are above some value cut, at least


@dataclass
class _Search:
    network: Network
    loads: Sequence[Load]
    budgets: Sequence[int]
    work: int  # points that may still be compared
    plans: dict[Choices, EvaluatedChoices] = field(default_factory=dict)
    points: dict[Choices, np.ndarray] = field(default_factory=dict)  # in units
    bound: float = -np.inf  # of the cost of plans within the limits
    least: float = -np.inf  # of the overshoot, in the largest unit
    part: MultiObjectiveNetwork = field(init=False)
    prices: np.ndarray = field(init=False)  # in units

    def __post_init__(self) -> None:
        self.prices = np.zeros(len(self.loads))

    # -- plans ---------------------------------------------------------------------------------------

    def meet(self, choices: Choices) -> None:
        if choices in self.plans:
            return
        cost = cost_of(self.network, choices)
        if cost == np.inf:
            return
        if not self.plans:
            self.part = multi_objective(self.network, self.loads, cost)
        amounts = tuple(load.amount(self.network, choices) for load in self.loads)
        self.plans[choices] = EvaluatedChoices(choices, cost, amounts)
        self.points[choices] = np.array([cost, *amounts]) / self.part.units

    def start(self, free: SearchAnswer) -> None:
        self.meet(free.choices)
        self.bound = free.bound / self.part.units[0]

    @property
    def limits(self) -> np.ndarray:
        """In units; a little more than asked for, as sums are rounded."""
        return np.array([load.limit for load in self.loads]) / self.part.units[1:] + SLACK

    @property
    def best(self) -> EvaluatedChoices | None:
        """The cheapest plan within the limits; of equally good ones the one whose copies are alike."""
        fitting = [self.plans[c] for c, point in self.points.items() if (point[1:] <= self.limits).all()]
        if not fitting:
            return None
        least = min(plan.cost for plan in fitting)
        good = [plan for plan in fitting if plan.cost <= least + CLOSE * abs(least)]
        return min(good, key=lambda plan: (not copies_alike(self.network, plan.choices), plan.cost))

    @property
    def cost(self) -> float:
        """Of the best plan, in units."""
        return np.inf if self.best is None else self.best.cost / self.part.units[0]

    @property
    def proven(self) -> bool:
        return self.cost <= self.bound + CLOSE * abs(self.cost)

    def over(self) -> np.ndarray:
        return np.array([point[1:] - self.limits for point in self.points.values()])

    # -- prices --------------------------------------------------------------------------------------

    def ascend(self, prices: Sequence[float], solves: int) -> None:
        """Find the prices that prove the most, and plans that are cheapest at some prices."""
        query = np.array(prices) * self.part.units[1:] / self.part.units[0]
        if not query.any():
            query = self.master().prices
        for _ in range(solves):
            answer = solve(self.part.weighted([1.0, *query]), self.budgets)
            found = answer.bound - float(query @ self.limits)
            if found > self.bound:
                self.bound, self.prices = found, query
            self.meet(answer.choices)
            master = self.master()
            if self.proven or master.value <= self.bound + CLOSE * abs(self.bound):
                return
            # with several loads, plans known so far say little about prices far from the best ones
            far = self.prices.any() and len(self.loads) > 1 and found < self.bound
            query = self.prices + (master.prices - self.prices) * (NEARER if far else 1.0)

    def master(self) -> Master:
        costs = np.array([point[0] for point in self.points.values()])
        return best_prices(costs, self.over(), HIGHEST)

    # -- feasibility ---------------------------------------------------------------------------------

    def scales(self) -> np.ndarray:
        """Overshoots of all loads are compared in one unit."""
        units = np.array(self.part.units[1:])
        return units / units.max()

    def overshoot(self) -> float:
        return float((self.over() * self.scales()).max(1).min())

    def approach(self, solves: int) -> None:
        """Find a plan within the limits, or prove that there is none, or come close to either."""
        scales = self.scales()
        mix = worst_mix(self.over() * scales).prices
        for _ in range(solves):
            answer = solve(self.part.weighted([0.0, *(mix * scales)]), self.budgets)
            self.least = max(self.least, answer.bound - float(mix * scales @ self.limits))
            self.meet(answer.choices)
            master = worst_mix(self.over() * scales)
            if self.settled or master.value <= self.least + CLOSE:
                break
            mix = master.prices
        part = self.part.only(range(1, len(self.part.units)))
        self.narrow_down(part, lambda: self.nearer(mix), Goal(self.limits, CLOSE / 2, scales))

    @property
    def settled(self) -> bool:
        return self.overshoot() <= max(0.0, self.least + CLOSE)

    def nearer(self, mix: np.ndarray) -> _Aim:
        """What a plan that overshoots by less than the best one known has to keep within."""
        scales, most = self.scales(), self.overshoot()
        weights = [mix * scales, *np.diag(scales)]
        cuts = [Cut(tuple(row), float(row @ self.limits) + most, True) for row in weights]

        def learn(above: float) -> None:
            self.least = max(self.least, min(self.overshoot(), most + above))

        return _Aim(cuts, self.settled, most, most, learn)

    # -- mixtures ------------------------------------------------------------------------------------

    def better(self) -> _Aim:
        """What a plan that costs less than the best one known has to keep within.

        Plans that use up one thing too soon, or leave it to the others, show at other prices than the best ones."""
        most = self.cost - CLOSE / 2 * abs(self.cost)
        nearby = [self.prices]
        if len(self.loads) > 1:
            steps = AROUND * np.diag(np.where(self.prices > 0, self.prices, self.prices.mean()))
            nearby += [np.maximum(self.prices + step, 0.0) for step in (*steps, *-steps)]
        cuts = [Cut((1.0, *prices), most + float(prices @ self.limits), True) for prices in nearby]
        single = zip(np.eye(len(self.limits)), self.limits, strict=True)
        cuts += [Cut((0.0, *row), float(limit), False) for row, limit in single]

        def learn(above: float) -> None:
            self.bound = max(self.bound, min(self.cost, most + above))

        return _Aim(cuts, self.proven, self.cost, most, learn)

    def narrow_down(self, part: MultiObjectiveNetwork, aim: Callable[[], _Aim], goal: Goal) -> None:
        """Mix the plans seen, block by block; then their choices; then all choices that a better plan may have.

        A better plan rules out more, so that is done again; without one, with all the work that is left."""
        little = self.work < LITTLE
        share = self.work if little else self.work // SHARES
        for whole in (True, False):
            if (whole or share) and not aim().done:
                self.mix_seen(part, aim(), goal, share, whole)
        while not little and share > 0 and not (now := aim()).done:
            kept = possible(part, now.cuts)
            if kept is None:
                now.learn(np.inf)
                break
            found = mixture_of_points(part.restricted(kept), now.cuts, goal, share)
            self.take(found, kept)
            now.learn(min(found.dropped, found.bound - now.most))
            if aim().value >= now.value - CLOSE * abs(now.value):
                if found.dropped == np.inf or share >= self.work:
                    break
                share = self.work
            share = min(share, self.work)

    def mix_seen(self, part: MultiObjectiveNetwork, aim: _Aim, goal: Goal, work: int, whole: bool) -> None:
        """The best plan of blocks that each choose as one in some plan seen does; or of all choices seen."""
        kept = self.seen_choices()
        left = part.restricted(kept)
        if whole:
            rows = [self.seen_rows(b, kept) for b in range(len(self.network.blocks))]
            self.take(mixture_of_rows(left, goal, rows), kept)
        else:
            self.take(mixture_of_points(left, aim.cuts, goal, work), kept)

    def take(self, found: Found, kept: dict[Own, np.ndarray]) -> None:
        if found.choices is not None:
            self.meet(original(self.network, kept, found.choices))
        self.work -= found.work

    def seen_rows(self, b: int, kept: dict[Own, np.ndarray]) -> np.ndarray:
        rows = dict.fromkeys(
            own
            for choices in self.plans
            for copy, own in zip(self.network.copies, choices, strict=True)
            if copy.block == b
        )
        columns = np.array([*rows]).T
        return np.stack([np.searchsorted(kept[b, v], column) for v, column in enumerate(columns)], axis=1)

    def seen_choices(self) -> dict[Own, np.ndarray]:
        left = {
            (b, v): np.zeros(block.sizes[v], bool)
            for b, block in enumerate(self.network.blocks)
            for v in range(block.own)
        }
        for choices in self.plans:
            for block, own in {(copy.block, own) for copy, own in zip(self.network.copies, choices, strict=True)}:
                for v, choice in enumerate(own):
                    left[block, v][choice] = True
        return agreed(self.network, left)

    # -- the end -------------------------------------------------------------------------------------

    def result(self) -> LimitedAnswer:
        units = np.array(self.part.units)
        prices = tuple((self.prices * units[0] / units[1:]).tolist())
        seen, best = tuple(self.plans.values()), self.best
        if best is not None:
            bound = best.cost if self.proven else min(self.bound * units[0], best.cost)
            answer = SearchAnswer(best.choices, best.cost, float(bound), copies_alike(self.network, best.choices))
            return LimitedAnswer(answer, best.amounts, prices, seen, None, False)
        limits = np.array([load.limit for load in self.loads])
        overshoots = [float((np.array(plan.amounts) - limits).max()) for plan in seen]
        closest = int(np.argmin(overshoots))
        bound = min(self.least * float(units[1:].max()), overshoots[closest])
        return LimitedAnswer(
            None, None, prices, seen, LeastOvershoot(seen[closest], overshoots[closest], float(bound)), self.least > 0.0
        )
