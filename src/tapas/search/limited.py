"""The cheapest plan that keeps within limits: prices for what is limited, then all that the prices leave open.

Any prices give a lower bound for all plans within the limits. The best ones rarely give a plan that uses a limit
up, as copies of a block switch all at once; so the choices of the plans met on the way are mixed freely, exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tapas.search.folded import BUDGETS, Answer, alike, solve
from tapas.search.marginals import possible
from tapas.search.measures import Load, Measured, measured
from tapas.search.network import Choices, Network, cost_of
from tapas.search.pareto import POINTS, contracted
from tapas.search.points import Cut
from tapas.search.prices import Master, best_prices, worst_mix
from tapas.search.restrict import Own, agreed, original

SOLVES = 12  # searches with prices
HIGHEST = 1e5  # price, in units: what a whole limit may cost in whole plans
SLACK = 1e-10  # relative: what rounding may do to amounts
ROUNDS = 4  # attempts at a proof
MORE = 5  # times the points, where the last attempt had too few of them
CLOSE = 1e-9  # relative: plans whose costs differ by less are equally good


@dataclass(frozen=True)
class Seen:
    choices: Choices
    cost: float
    amounts: tuple[float, ...]


@dataclass(frozen=True)
class Least:
    """How far the limits are out of reach: the most that any load is above its limit."""

    plan: Seen
    overshoot: float  # of that plan
    bound: float  # of any plan


@dataclass(frozen=True)
class Limited:
    answer: Answer | None  # None: no plan within the limits was found
    amounts: tuple[float, ...] | None
    prices: tuple[float, ...]  # cost per amount
    seen: tuple[Seen, ...]  # all plans met on the way, also those beyond the limits
    least: Least | None  # where no plan within the limits was found
    infeasible: bool  # it is proven that there is none


def solve_within(
    network: Network, loads: Sequence[Load], prices: Sequence[float] = (), seen: Sequence[Seen] = (),
    solves: int = SOLVES, budgets: Sequence[int] = BUDGETS, room: int = POINTS,
) -> Limited:  # fmt: skip
    """The cheapest plan whose amounts are within the limits. Prices and plans of an earlier search, with fewer
    loads or other limits, make for a good start."""
    search = _Search(network, loads, budgets, room)
    for plan in seen:
        search.meet(plan.choices)
    if not search.plans:
        free = solve(network, budgets)
        if free.cost == np.inf:
            return Limited(None, None, (0.0,) * len(loads), (), None, free.bound == np.inf)
        search.start(free)
        if search.best is not None:
            return search.result()
    search.ascend([*prices, *[0.0] * (len(loads) - len(prices))], solves)
    if search.best is None:
        search.approach(solves)
    if search.best is not None and not search.proven:
        search.mix()
        search.prove()
    return search.result()


@dataclass
class _Search:
    network: Network
    loads: Sequence[Load]
    budgets: Sequence[int]
    room: int
    plans: dict[Choices, Seen] = field(default_factory=dict)
    points: dict[Choices, np.ndarray] = field(default_factory=dict)  # in units
    bound: float = -np.inf  # of the cost of plans within the limits
    least: float = -np.inf  # of the overshoot, in the largest unit
    part: Measured = field(init=False)
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
            self.part = measured(self.network, self.loads, cost)
        amounts = tuple(load.amount(self.network, choices) for load in self.loads)
        self.plans[choices] = Seen(choices, cost, amounts)
        self.points[choices] = np.array([cost, *amounts]) / self.part.units

    def start(self, free: Answer) -> None:
        self.meet(free.choices)
        self.bound = free.bound / self.part.units[0]

    @property
    def limits(self) -> np.ndarray:
        """In units; a little more than asked for, as sums are rounded."""
        return np.array([load.limit for load in self.loads]) / self.part.units[1:] + SLACK

    @property
    def best(self) -> Seen | None:
        """The cheapest plan within the limits; of equally good ones the one whose copies are alike."""
        fitting = [self.plans[c] for c, point in self.points.items() if (point[1:] <= self.limits).all()]
        if not fitting:
            return None
        least = min(plan.cost for plan in fitting)
        good = [plan for plan in fitting if plan.cost <= least + CLOSE * abs(least)]
        return min(good, key=lambda plan: (not alike(self.network, plan.choices), plan.cost))

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
            query = master.prices

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
            if self.overshoot() <= max(0.0, self.least + CLOSE) or master.value <= self.least + CLOSE:
                break
            mix = master.prices
        if self.overshoot() > max(0.0, self.least + CLOSE):
            self.settle(mix, self.seen_choices())
        for _ in range(ROUNDS):
            if self.overshoot() <= max(0.0, self.least + CLOSE):
                break
            self.settle(mix, None)

    def settle(self, mix: np.ndarray, kept: dict[Own, np.ndarray] | None) -> None:
        """The plan that overshoots least, among some choices or all that could be part of a better one than known."""
        scales, limits, most = self.scales(), self.limits, self.overshoot()
        cuts = [Cut(tuple(mix * scales), most + float(mix * scales @ limits))]
        cuts += [
            Cut(tuple(row), float(limit + most / scale))
            for row, limit, scale in zip(np.eye(len(limits)), limits, scales, strict=True)
        ]
        part = self.part.only(range(1, len(self.part.units)))
        everything = kept is None
        kept = possible(part, cuts) if kept is None else kept
        if kept is None:
            self.least = most
            return
        part = part.restricted(kept)
        found = contracted(part, cuts, lambda sums: ((sums - limits) * scales).max(1), self.room)
        if found.choices is not None:
            self.meet(original(self.network, kept, found.choices))
        if everything:
            proven = found.dropped - float(mix * scales @ limits)
            self.least = max(self.least, min(self.overshoot(), proven))

    # -- mixtures ------------------------------------------------------------------------------------

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

    def cuts(self) -> list[Cut]:
        """What a better plan than the best one known has to keep within."""
        most = self.cost - CLOSE / 2 * abs(self.cost) + float(self.prices @ self.limits)
        single = [
            Cut((0.0, *row), float(limit)) for row, limit in zip(np.eye(len(self.limits)), self.limits, strict=True)
        ]
        return [Cut((1.0, *self.prices), most), *single]

    def mix(self) -> None:
        """The best of all plans that choose as some plan seen does, each copy as it likes."""
        kept = self.seen_choices()
        found = contracted(self.part.restricted(kept), self.cuts(), lambda sums: sums[:, 0], self.room)
        if found.choices is not None:
            self.meet(original(self.network, kept, found.choices))

    def prove(self) -> None:
        """The best of all plans that prices do not rule out. A better plan rules out more, so it is tried again."""
        room = self.room
        for _ in range(ROUNDS):
            if self.proven:
                return
            before, cuts = self.cost, self.cuts()
            kept = possible(self.part, cuts)
            if kept is None:
                self.bound = self.cost
                return
            found = contracted(self.part.restricted(kept), cuts, lambda sums: sums[:, 0], room)
            if found.choices is not None:
                self.meet(original(self.network, kept, found.choices))
            self.bound = max(self.bound, min(self.cost, found.dropped - float(self.prices @ self.limits)))
            if self.cost >= before - CLOSE * abs(before):
                room *= MORE

    # -- the end -------------------------------------------------------------------------------------

    def result(self) -> Limited:
        units = np.array(self.part.units)
        prices = tuple((self.prices * units[0] / units[1:]).tolist())
        seen, best = tuple(self.plans.values()), self.best
        if best is not None:
            bound = best.cost if self.proven else min(self.bound * units[0], best.cost)
            answer = Answer(best.choices, best.cost, float(bound), alike(self.network, best.choices))
            return Limited(answer, best.amounts, prices, seen, None, False)
        limits = np.array([load.limit for load in self.loads])
        overshoots = [float((np.array(plan.amounts) - limits).max()) for plan in seen]
        closest = int(np.argmin(overshoots))
        bound = min(self.least * float(units[1:].max()), overshoots[closest])
        return Limited(
            None, None, prices, seen, Least(seen[closest], overshoots[closest], float(bound)), self.least > 0.0
        )
