"""The cheapest plan that keeps within limits: prices for what is limited, then all that the prices leave open.

Any prices give a lower bound for all plans within the limits. The best ones rarely give a plan that uses a limit
up, as copies of a block switch all at once. So what blocks do in the plans met on the way is mixed, first for the
prices (a linear program), then for plans (the same over whole numbers); then their choices are, block by block; then
all choices that min-marginals leave: with a good plan at hand, those are few.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tapas.search.engine import EvaluatedChoices, SearchProblem, SearchResult
from tapas.search.integer_program import RelaxedSolution
from tapas.search.min_marginals import feasible_domains
from tapas.search.mixture_program import COLUMNS, Goal, Mixture, mixture_of_rows, mixture_within_cuts, relaxed_mixture
from tapas.search.monitor import SearchLog
from tapas.search.multi_objective import LinearCut, Load, MultiObjectiveNetwork, multi_objective
from tapas.search.network import Domains, Network, cost_of, original_choices
from tapas.search.rows import known_rows
from tapas.search.run_length import Choices
from tapas.search.solver import SearchAnswer, solve
from tapas.search.tied import copies_alike

HIGHEST = 1e5  # price, in units: what a whole limit may cost in whole plans
SLACK = 1e-10  # relative: what rounding may do to amounts
LITTLE_WORK = 50_000  # work that is not enough to look at more than what evaluated plans do
SHARES = 8  # the part of it for a first attempt, one in so many
CLOSE = 1e-7  # relative: plans whose costs differ by less are equally good
PRICED = 3e-5, 1e-3  # relative: a search at prices comes so close, at least and at most
HURRIED = 3e-3  # relative: where no mixtures are looked for afterwards
PART = 0.1  # of what better prices may prove: so much may be lost by not coming closer
ASCENDED = 1e-5  # relative: better prices would prove no more than this
LOOSE = 1e-5  # relative: as good as the best mixture of choices, where all of them come next
FEW = 300  # columns of the program that finds it
ENOUGH = 1e-3  # relative: a gap that is closed only as far as that takes little
POLISH = 100_000  # work for it
QUICK = 20_000  # work that another round of it may take
POLISHED = 150  # columns of its programs
MANY = 3_000  # choices: with so many left, not all of them can be looked at
REFUSALS = 4  # of mixtures by a referee, until others are looked for


@dataclass(frozen=True)
class _Target:
    """What is looked for: a plan within the cuts. What is known: its value is below that of the best plan so far."""

    cuts: Sequence[LinearCut]
    done: bool
    value: float
    most: float  # that a better plan's value is
    learn: Callable[[float], None]  # by how much plans that were not looked at are above some value cut, at least


@dataclass
class LagrangianSearch:
    problem: SearchProblem
    ceiling: float = np.inf  # what the best plan costs, if that is known from elsewhere
    loads: list[Load] = field(init=False)  # those that the referee names are added
    work: int = field(init=False)  # points that may still be compared
    plans: dict[Choices, EvaluatedChoices] = field(default_factory=dict[Choices, EvaluatedChoices])
    points: dict[Choices, np.ndarray] = field(default_factory=dict[Choices, np.ndarray])  # in units
    verdicts: dict[Choices, bool] = field(default_factory=dict[Choices, bool])  # the referee's
    margin: float = 0.0  # amount that mixtures stay below their limits, as the referee has refused others
    bound: float = -np.inf  # of the cost of plans within the limits
    least: float = -np.inf  # of the overshoot, in the largest unit
    searched: list[np.ndarray] = field(default_factory=list[np.ndarray])  # prices, in units
    log: SearchLog = field(init=False)
    objectives: MultiObjectiveNetwork = field(init=False)
    prices: np.ndarray = field(init=False)  # in units

    def __post_init__(self) -> None:
        self.loads, self.work = [*self.problem.loads], self.problem.work
        self.log = SearchLog(self.problem.shown)
        self.prices = np.zeros(len(self.loads))

    @property
    def network(self) -> Network:
        return self.problem.network

    def begin(self) -> SearchResult | None:
        """With what is known, or with the cheapest plan of all; if that is within the limits, nothing is left to do."""
        for plan in self.problem.evaluated:
            self.evaluate(plan.choices)
        if not self.plans:
            free = solve(self.network, self.problem.budgets, note=self.note_free)
            if free.cost == np.inf:
                return SearchResult(None, prices=(0.0,) * len(self.loads), infeasible=free.bound == np.inf)
            self.start(free)
            self.note()
            if self.best is not None:
                plans = tuple(self.plans.values())
                return SearchResult(free, plans[0].amounts, (0.0,) * len(self.loads), plans)
        self.price([*self.problem.prices, *[0.0] * (len(self.loads) - len(self.problem.prices))])
        return None

    def note_free(self, cost: float, bound: float) -> None:
        """Of plans that may be beyond the limits only the bound says something."""
        self.log.note(np.inf if self.loads else cost, bound)

    def note(self) -> None:
        """Where things stand, for those who watch."""
        self.log.note(self.cost * self.objectives.units[0], self.bound * self.objectives.units[0])

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
        if self.keeps_within(choices):
            self.judge(choices)

    def judge(self, choices: Choices) -> None:
        overrun = self.problem.referee(choices)
        self.verdicts[choices] = overrun is None
        if overrun is not None and overrun.load is not None:
            self.add_load(overrun.load)
        elif overrun is not None:
            self.margin = max(self.margin, overrun.excess)

    def add_load(self, load: Load) -> None:
        self.loads.append(load)
        for choices, plan in self.plans.items():
            amounts = (*plan.amounts, load.amount(self.network, choices))
            self.plans[choices] = replace(plan, amounts=amounts)
        self.prices = np.append(self.prices, 0.0)
        before = self.objectives.units[0]
        self.objectives = multi_objective(self.network, self.loads, before)
        units = np.array(self.objectives.units)
        self.points = {choices: np.array([plan.cost, *plan.amounts]) / units for choices, plan in self.plans.items()}

    def start(self, free: SearchAnswer) -> None:
        self.evaluate(free.choices)
        self.bound = free.bound / self.objectives.units[0]

    @property
    def limits(self) -> np.ndarray:
        """In units; a little more than asked for, as sums are rounded."""
        return np.array([load.limit for load in self.loads]) / self.objectives.units[1:] + SLACK

    def keeps_within(self, choices: Choices) -> bool:
        return bool((self.points[choices][1:] <= self.limits).all())

    @property
    def best(self) -> EvaluatedChoices | None:
        """The cheapest plan within the limits; of equally good ones the one whose copies are alike."""
        fitting = [self.plans[c] for c, accepted in self.verdicts.items() if accepted and self.keeps_within(c)]
        if not fitting:
            return None
        least = min(plan.cost for plan in fitting)
        good = [plan for plan in fitting if plan.cost <= least + CLOSE * abs(least)]
        return min(good, key=lambda plan: (not copies_alike(self.network, plan.choices), plan.cost))

    @property
    def least_cost(self) -> float:
        """Of the best plan, wherever it is from."""
        return self.ceiling if self.best is None else min(self.ceiling, self.best.cost)

    @property
    def cost(self) -> float:
        """The same in units."""
        return self.least_cost / self.objectives.units[0]

    @property
    def lower_bound(self) -> float:
        """Not in units."""
        return self.bound * self.objectives.units[0]

    def learn_bound(self, bound: float) -> None:
        """Of the cost of all plans, not in units."""
        self.bound = max(self.bound, min(self.cost, bound / self.objectives.units[0]))
        self.note()

    @property
    def proven(self) -> bool:
        return self.cost < np.inf and self.cost <= self.bound + CLOSE * abs(self.cost)

    def excess(self) -> np.ndarray:
        return np.array([point[1:] - self.limits for point in self.points.values()])

    # -- the order of things ---------------------------------------------------------------------------

    def price(self, prices: Sequence[float]) -> None:
        self.prices = np.array(prices) * self.objectives.units[1:] / self.objectives.units[0]

    def approach(self, solves: int) -> None:
        """With prices and mixtures, until another load is known of."""
        if self.enough and self.work <= 0:
            return
        self.ascend(solves)
        if self.best is None:
            self.minimize_overshoot(solves)
        if self.best is not None and not self.proven:
            count = len(self.loads)
            self.mix_plans(self.objectives, self.cheaper_target, self.cheaper_goal)
            if len(self.loads) == count:
                self.mix_choices(self.objectives, self.cheaper_target, self.cheaper_goal)

    def close_gap(self) -> None:
        """With all choices that the best prices leave open."""
        if self.cost < np.inf and not self.proven:
            self.search_exactly(self.objectives, self.cheaper_target, self.cheaper_goal)

    @property
    def enough(self) -> bool:
        return self.cost < np.inf and self.cost <= self.bound + ENOUGH * abs(self.cost)

    def cheaper_goal(self) -> Goal:
        columns = POLISHED if self.enough else COLUMNS
        return Goal(self.aims, CLOSE / 4 * abs(self.bound), ceiling=self.cost, columns=columns)

    @property
    def aims(self) -> np.ndarray:
        """Limits for mixtures, in units."""
        return self.limits - self.margin / np.array(self.objectives.units[1:])

    # -- prices --------------------------------------------------------------------------------------

    def ascend(self, solves: int) -> None:
        """Find the prices that prove the most, and plans that are cheapest at some prices."""
        master = self.master()
        query = self.prices if self.prices.any() and not self.searched else master.prices
        for _ in range(solves):
            if self.known(query):
                return
            loss = PART * (master.cost - self.bound) / max(1.0, float(query @ self.limits))
            close = float(np.clip(loss, *PRICED)) if self.problem.work else HURRIED
            answer = solve(self.objectives.weighted([1.0, *query]), self.problem.budgets, False, close)
            self.searched.append(query)
            dual_value = answer.bound - float(query @ self.limits)
            if dual_value > self.bound:
                self.bound, self.prices = dual_value, query
            self.evaluate(answer.choices)
            self.note()
            master = self.master()
            enough = self.proven or (self.enough and self.ceiling < np.inf)
            if enough or master.cost <= self.bound + ASCENDED * abs(self.bound):
                return
            query = master.prices

    def known(self, prices: np.ndarray) -> bool:
        """Whether these have been searched at; loads that are new cost nothing then."""
        padded = (np.pad(earlier, (0, len(prices) - len(earlier))) for earlier in self.searched)
        return any(np.allclose(earlier, prices, rtol=1e-9) for earlier in padded)

    def master(self) -> RelaxedSolution:
        """The best prices by what blocks do in the plans known so far, in any mixture; where none keeps within the
        limits, those at which frugal plans are found."""
        relaxed = relaxed_mixture(self.objectives, Goal(self.limits, 0.0), self.plans)
        if relaxed is not None:
            return replace(relaxed, prices=np.minimum(relaxed.prices, HIGHEST))
        frugal = self.shares()
        return replace(frugal, cost=np.inf, prices=HIGHEST * frugal.prices * self.scales())

    def shares(self) -> RelaxedSolution:
        """The same for the least overshoot."""
        objectives = self.objectives.select(range(1, len(self.objectives.units)))
        relaxed = relaxed_mixture(objectives, Goal(self.limits, 0.0, self.scales()), self.plans)
        assert relaxed is not None  # any mixture overshoots by something
        return relaxed

    # -- feasibility ---------------------------------------------------------------------------------

    def scales(self) -> np.ndarray:
        """Overshoots of all loads are compared in one unit."""
        units = np.array(self.objectives.units[1:])
        return units / units.max()

    def overshoot(self) -> float:
        return float((self.excess() * self.scales()).max(1).min())

    def minimize_overshoot(self, solves: int) -> None:
        """Find a plan within the limits, or prove that there is none, or come close to either."""
        scales, count = self.scales(), len(self.loads)
        mix = self.shares().prices
        for _ in range(solves):
            answer = solve(self.objectives.weighted([0.0, *(mix * scales)]), self.problem.budgets, False, CLOSE)
            self.least = max(self.least, answer.bound - float(mix * scales @ self.limits))
            self.evaluate(answer.choices)
            if len(self.loads) > count:
                return
            master = self.shares()
            if self.settled or master.cost <= self.least + CLOSE:
                break
            mix = master.prices
        objectives = self.objectives.select(range(1, len(self.objectives.units)))
        goal = Goal(self.limits, CLOSE / 2, scales)
        self.mix_plans(objectives, lambda: self.nearer_target(mix), lambda: goal)
        if len(self.loads) == count:
            self.mix_choices(objectives, lambda: self.nearer_target(mix), lambda: goal)
        if len(self.loads) == count:
            self.search_exactly(objectives, lambda: self.nearer_target(mix), lambda: goal)

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
        """What a plan that costs less than the best one known has to keep within: at the best prices."""
        most = self.cost - CLOSE / 2 * abs(self.cost)
        cut = LinearCut((1.0, *self.prices), most + float(self.prices @ self.limits), True)

        def learn(above: float) -> None:
            if not self.margin:  # or what was looked at had to keep within less
                self.bound = max(self.bound, min(self.cost, most + above))

        return _Target([cut], self.proven, self.cost, most, learn)

    def mix_plans(
        self, objectives: MultiObjectiveNetwork, target: Callable[[], _Target], goal: Callable[[], Goal]
    ) -> None:
        """Find the best plan of blocks that each choose as one in some evaluated plan does."""
        count = len(self.loads)
        for _ in range(REFUSALS):
            if not self.mix_rows(objectives, goal()) or len(self.loads) > count or target().done:
                break

    def mix_choices(
        self, objectives: MultiObjectiveNetwork, target: Callable[[], _Target], goal: Callable[[], Goal]
    ) -> None:
        """Find the best plan of choices that evaluated plans make."""
        work = self.allowance()
        if work > 0 and not target().done:
            domains = known_rows(objectives.network, self.plans).domains
            wanted = goal()
            loose = replace(wanted, tolerance=LOOSE * abs(target().value), columns=min(FEW, wanted.columns))
            self.adopt(mixture_within_cuts(objectives.restricted(domains), target().cuts, loose, work), domains)

    def allowance(self) -> int:
        """What part of the work that is left a first attempt may take."""
        share = self.work if self.work < LITTLE_WORK else self.work // SHARES
        if self.enough:
            self.work = min(self.work, POLISH)
        return min(share, self.work)

    def search_exactly(
        self, objectives: MultiObjectiveNetwork, target: Callable[[], _Target], goal: Callable[[], Goal]
    ) -> None:
        """Mix all choices that a better plan may have. Such a plan rules out more, so that is done again; without one,
        with all the work that is left."""
        count, share = len(self.loads), self.allowance() if self.work >= LITTLE_WORK else 0
        domains, value = None, np.inf
        while share > 0 and len(self.loads) == count and not (now := target()).done:
            if now.value < value:
                domains, value = feasible_domains(objectives, now.cuts), now.value
            if domains is None:
                now.learn(np.inf)
                break
            if sum(map(len, domains.values())) > MANY:
                break
            mixture = mixture_within_cuts(objectives.restricted(domains), now.cuts, goal(), share)
            now.learn(min(mixture.dropped, mixture.bound - now.most))
            self.adopt(mixture, domains)
            if len(self.loads) > count or (self.enough and mixture.work > QUICK):
                break
            if target().value >= now.value - CLOSE * abs(now.value):
                if mixture.dropped == np.inf or share >= self.work:
                    break
                share = self.work
            share = min(share, self.work)

    def mix_rows(self, objectives: MultiObjectiveNetwork, goal: Goal) -> bool:
        """Whether the plan that comes of it was refused."""
        known = known_rows(objectives.network, self.plans)
        return self.adopt(mixture_of_rows(objectives.restricted(known.domains), goal, known.rows), known.domains)

    def adopt(self, mixture: Mixture, domains: Domains) -> bool:
        """Whether the plan is one that the referee refused."""
        self.work -= mixture.work
        if mixture.choices is None:
            return False
        choices = self.problem.arrange(original_choices(self.objectives.network, domains, mixture.choices))
        self.evaluate(choices)
        self.note()
        return not self.verdicts.get(choices, True)
