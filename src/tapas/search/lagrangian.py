"""The cheapest plan that keeps within limits: prices for what is limited, then all that the prices leave open.

Any prices give a lower bound for all plans within the limits. The best ones rarely give a plan that uses a limit
up, as copies of a block switch all at once; so the choices of the plans met on the way are mixed freely, exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tapas.search.cutting_planes import PriceMaster, infeasibility_prices, lagrangian_prices
from tapas.search.min_marginals import feasible_domains
from tapas.search.mixture_program import Goal, Mixture, mixture_of_rows, mixture_within_cuts
from tapas.search.multi_objective import LinearCut, Load, MultiObjectiveNetwork, multi_objective
from tapas.search.network import BlockVariable, Domains, Network, common_domains, cost_of, original_choices
from tapas.search.run_length import Choices
from tapas.search.solver import BUDGETS, SearchAnswer, solve
from tapas.search.tied import copies_alike

SOLVES = 6  # searches with prices for each load, and for one more
HIGHEST = 1e5  # price, in units: what a whole limit may cost in whole plans
SLACK = 1e-10  # relative: what rounding may do to amounts
NEARER = 0.5  # part of the way to the prices that look best, where those before did not prove more
WORK = 1_000_000  # points that are compared with one load: seconds; fewer with more loads, as they take longer
AROUND = 0.3  # relative: prices are looked at this far from the best ones
LITTLE = 50_000  # work that is not enough to look at more than what evaluated plans do
SHARES = 8  # the part of it for a first attempt, one in so many
CLOSE = 1e-7  # relative: plans whose costs differ by less are equally good


@dataclass(frozen=True)
class EvaluatedChoices:
    choices: Choices
    cost: float
    amounts: tuple[float, ...]


@dataclass(frozen=True)
class LeastOvershoot:
    """How far the limits are out of reach: the most that any load is above its limit."""

    plan: EvaluatedChoices
    overshoot: float  # of that plan
    bound: float  # of any plan


@dataclass(frozen=True)
class LimitedAnswer:
    """What a search within limits comes to."""

    answer: SearchAnswer | None  # None: no plan within the limits was found
    amounts: tuple[float, ...] | None
    prices: tuple[float, ...]  # cost per amount
    evaluated: tuple[EvaluatedChoices, ...]  # all plans met on the way, also those beyond the limits
    least_overshoot: LeastOvershoot | None  # where no plan within the limits was found
    infeasible: bool  # it is proven that there is none


def solve_within(
    network: Network, loads: Sequence[Load], prices: Sequence[float] = (), evaluated: Sequence[EvaluatedChoices] = (),
    solves: int | None = None, budgets: Sequence[int] = BUDGETS, work: int | None = None,
) -> LimitedAnswer:  # fmt: skip
    """The cheapest plan whose amounts are within the limits. Prices and plans of an earlier search, with fewer
    loads or other limits, make for a good start.

    >>> from tapas.search import BlockCopy, BlockNetwork, table
    >>> block = BlockNetwork((2,), 1, (table((0,), np.array([1.0, 3.0])),))  # cheap and large, or dear and small
    >>> memory = Load(((table((0,), np.array([2.0, 1.0])),),), limit=3.0)
    >>> solve_within(Network((block,), [BlockCopy(0, ())] * 2), [memory]).answer
    SearchAnswer(choices=((0,), (1,)), cost=4.0, bound=4.0, alike=False)
    """
    work = WORK // max(len(loads), 1) ** 2 if work is None else work
    search = _LagrangianSearch(network, loads, budgets, work)
    solves = SOLVES * (1 + len(loads)) if solves is None else solves
    for plan in evaluated:
        search.evaluate(plan.choices)
    if not search.plans:
        free = solve(network, budgets)
        if free.cost == np.inf:
            return LimitedAnswer(None, None, (0.0,) * len(loads), (), None, free.bound == np.inf)
        search.start(free)
        if search.best is not None:
            evaluated = tuple(search.plans.values())
            return LimitedAnswer(free, evaluated[0].amounts, (0.0,) * len(loads), evaluated, None, False)
    search.ascend([*prices, *[0.0] * (len(loads) - len(prices))], solves)
    if search.best is None:
        search.minimize_overshoot(solves)
    if search.best is not None and not search.proven:
        search.close_gap(search.objectives, search.cheaper_target, Goal(search.limits, CLOSE / 4 * abs(search.bound)))
    return search.result()


@dataclass(frozen=True)
class _Target:
    """What is looked for: a plan within the cuts. What is known: its value is below that of the best plan so far."""

    cuts: Sequence[LinearCut]
    done: bool
    value: float
    most: float  # that a better plan's value is
    learn: Callable[[float], None]  # by how much plans that were not looked at are above some value cut, at least


@dataclass
class _LagrangianSearch:
    network: Network
    loads: Sequence[Load]
    budgets: Sequence[int]
    work: int  # points that may still be compared
    plans: dict[Choices, EvaluatedChoices] = field(default_factory=dict[Choices, EvaluatedChoices])
    points: dict[Choices, np.ndarray] = field(default_factory=dict[Choices, np.ndarray])  # in units
    bound: float = -np.inf  # of the cost of plans within the limits
    least: float = -np.inf  # of the overshoot, in the largest unit
    objectives: MultiObjectiveNetwork = field(init=False)
    prices: np.ndarray = field(init=False)  # in units

    def __post_init__(self) -> None:
        self.prices = np.zeros(len(self.loads))

    # -- plans ---------------------------------------------------------------------------------------

    def evaluate(self, choices: Choices) -> None:
        if choices in self.plans:
            return
        cost = cost_of(self.network, choices)
        if cost == np.inf:
            return
        if not self.plans:
            self.objectives = multi_objective(self.network, self.loads, cost)
        amounts = tuple(load.amount(self.network, choices) for load in self.loads)
        self.plans[choices] = EvaluatedChoices(choices, cost, amounts)
        self.points[choices] = np.array([cost, *amounts]) / self.objectives.units

    def start(self, free: SearchAnswer) -> None:
        self.evaluate(free.choices)
        self.bound = free.bound / self.objectives.units[0]

    @property
    def limits(self) -> np.ndarray:
        """In units; a little more than asked for, as sums are rounded."""
        return np.array([load.limit for load in self.loads]) / self.objectives.units[1:] + SLACK

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
        return np.inf if self.best is None else self.best.cost / self.objectives.units[0]

    @property
    def proven(self) -> bool:
        return self.cost <= self.bound + CLOSE * abs(self.cost)

    def excess(self) -> np.ndarray:
        return np.array([point[1:] - self.limits for point in self.points.values()])

    # -- prices --------------------------------------------------------------------------------------

    def ascend(self, prices: Sequence[float], solves: int) -> None:
        """Find the prices that prove the most, and plans that are cheapest at some prices."""
        query = np.array(prices) * self.objectives.units[1:] / self.objectives.units[0]
        if not query.any():
            query = self.master().prices
        for _ in range(solves):
            answer = solve(self.objectives.weighted([1.0, *query]), self.budgets)
            dual_value = answer.bound - float(query @ self.limits)
            if dual_value > self.bound:
                self.bound, self.prices = dual_value, query
            self.evaluate(answer.choices)
            master = self.master()
            if self.proven or master.value <= self.bound + CLOSE * abs(self.bound):
                return
            # with several loads, plans known so far say little about prices far from the best ones
            far = self.prices.any() and len(self.loads) > 1 and dual_value < self.bound
            query = self.prices + (master.prices - self.prices) * (NEARER if far else 1.0)

    def master(self) -> PriceMaster:
        costs = np.array([point[0] for point in self.points.values()])
        return lagrangian_prices(costs, self.excess(), HIGHEST)

    # -- feasibility ---------------------------------------------------------------------------------

    def scales(self) -> np.ndarray:
        """Overshoots of all loads are compared in one unit."""
        units = np.array(self.objectives.units[1:])
        return units / units.max()

    def overshoot(self) -> float:
        return float((self.excess() * self.scales()).max(1).min())

    def minimize_overshoot(self, solves: int) -> None:
        """Find a plan within the limits, or prove that there is none, or come close to either."""
        scales = self.scales()
        mix = infeasibility_prices(self.excess() * scales).prices
        for _ in range(solves):
            answer = solve(self.objectives.weighted([0.0, *(mix * scales)]), self.budgets)
            self.least = max(self.least, answer.bound - float(mix * scales @ self.limits))
            self.evaluate(answer.choices)
            master = infeasibility_prices(self.excess() * scales)
            if self.settled or master.value <= self.least + CLOSE:
                break
            mix = master.prices
        objectives = self.objectives.select(range(1, len(self.objectives.units)))
        self.close_gap(objectives, lambda: self.nearer_target(mix), Goal(self.limits, CLOSE / 2, scales))

    @property
    def settled(self) -> bool:
        return self.overshoot() <= max(0.0, self.least + CLOSE)

    def nearer_target(self, mix: np.ndarray) -> _Target:
        """What a plan that overshoots by less than the best one known has to keep within."""
        scales, most = self.scales(), self.overshoot()
        weights = [mix * scales, *np.diag(scales)]
        cuts = [LinearCut(tuple(row), float(row @ self.limits) + most, True) for row in weights]

        def learn(above: float) -> None:
            self.least = max(self.least, min(self.overshoot(), most + above))

        return _Target(cuts, self.settled, most, most, learn)

    # -- mixtures ------------------------------------------------------------------------------------

    def cheaper_target(self) -> _Target:
        """What a plan that costs less than the best one known has to keep within.

        Plans that use up one thing too soon, or leave it to the others, show at other prices than the best ones."""
        most = self.cost - CLOSE / 2 * abs(self.cost)
        nearby = [self.prices]
        if len(self.loads) > 1:
            steps = AROUND * np.diag(np.where(self.prices > 0, self.prices, self.prices.mean()))
            nearby += [np.maximum(self.prices + step, 0.0) for step in (*steps, *-steps)]
        cuts = [LinearCut((1.0, *prices), most + float(prices @ self.limits), True) for prices in nearby]
        single = zip(np.eye(len(self.limits)), self.limits, strict=True)
        cuts += [LinearCut((0.0, *row), float(limit), False) for row, limit in single]

        def learn(above: float) -> None:
            self.bound = max(self.bound, min(self.cost, most + above))

        return _Target(cuts, self.proven, self.cost, most, learn)

    def close_gap(self, objectives: MultiObjectiveNetwork, target: Callable[[], _Target], goal: Goal) -> None:
        """Mix the evaluated plans, block by block; then their choices; then all choices that a better plan may have.

        A better plan rules out more, so that is done again; without one, with all the work that is left."""
        little = self.work < LITTLE
        share = self.work if little else self.work // SHARES
        for whole in (True, False):
            if (whole or share) and not target().done:
                self.mix_evaluated(objectives, target(), goal, share, whole)
        while not little and share > 0 and not (now := target()).done:
            domains = feasible_domains(objectives, now.cuts)
            if domains is None:
                now.learn(np.inf)
                break
            mixture = mixture_within_cuts(objectives.restricted(domains), now.cuts, goal, share)
            self.adopt(mixture, domains)
            now.learn(min(mixture.dropped, mixture.bound - now.most))
            if target().value >= now.value - CLOSE * abs(now.value):
                if mixture.dropped == np.inf or share >= self.work:
                    break
                share = self.work
            share = min(share, self.work)

    def mix_evaluated(
        self, objectives: MultiObjectiveNetwork, target: _Target, goal: Goal, work: int, whole: bool
    ) -> None:
        """The best plan of blocks that each choose as one in some evaluated plan does; or of all choices of those."""
        domains = self.evaluated_domains()
        left = objectives.restricted(domains)
        if whole:
            rows = [self.evaluated_rows(b, domains) for b in range(len(self.network.blocks))]
            self.adopt(mixture_of_rows(left, goal, rows), domains)
        else:
            self.adopt(mixture_within_cuts(left, target.cuts, goal, work), domains)

    def adopt(self, mixture: Mixture, domains: Domains) -> None:
        if mixture.choices is not None:
            self.evaluate(original_choices(self.network, domains, mixture.choices))
        self.work -= mixture.work

    def evaluated_rows(self, b: int, domains: Domains) -> np.ndarray:
        rows = dict.fromkeys(
            own
            for choices in self.plans
            for copy, own in zip(self.network.copies, choices, strict=True)
            if copy.block == b
        )
        table = np.array([*rows])
        return np.stack([np.searchsorted(domains[b, v], table[:, v]) for v in range(table.shape[1])], axis=1)

    def evaluated_domains(self) -> dict[BlockVariable, np.ndarray]:
        allowed = {(b, v): np.zeros(self.network.blocks[b].sizes[v], bool) for b, v in self.network.own_variables}
        for choices in self.plans:
            for block, own in {(copy.block, own) for copy, own in zip(self.network.copies, choices, strict=True)}:
                for v, choice in enumerate(own):
                    allowed[block, v][choice] = True
        return common_domains(self.network, allowed)

    # -- the end -------------------------------------------------------------------------------------

    def result(self) -> LimitedAnswer:
        units = np.array(self.objectives.units)
        prices = tuple((self.prices * units[0] / units[1:]).tolist())
        evaluated, best = tuple(self.plans.values()), self.best
        if best is not None:
            bound = best.cost if self.proven else min(self.bound * units[0], best.cost)
            answer = SearchAnswer(best.choices, best.cost, float(bound), copies_alike(self.network, best.choices))
            return LimitedAnswer(answer, best.amounts, prices, evaluated, None, False)
        limits = np.array([load.limit for load in self.loads])
        overshoots = [float((np.array(plan.amounts) - limits).max()) for plan in evaluated]
        closest = int(np.argmin(overshoots))
        bound = min(self.least * float(units[1:].max()), overshoots[closest])
        least = LeastOvershoot(evaluated[closest], overshoots[closest], float(bound))
        return LimitedAnswer(None, None, prices, evaluated, least, self.least > 0.0)
