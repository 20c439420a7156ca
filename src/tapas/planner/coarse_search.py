"""A good plan that fits into memory, fast and without proof: to compare many meshes.

Searches at prices for memory find plans on both sides of the limit, all copies of a block the same. The best plan
mostly lies between two of them: some copies do as the one, the others as the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter

from tapas.errors import PlanError
from tapas.planner.memory import Moment, Peak
from tapas.planner.tied_plans import TiedPlans
from tapas.search import Choices, Table

AROUND = (0.0, 0.4, 0.7, 0.95, 1.3, 2.0)  # times a good price
WIDE = (0.01, 0.1, 1.0, 10.0, 100.0)  # where nothing is known yet
FARTHER = (4.0, 16.0, 64.0)  # as long as nothing fits
ROUNDS = 2  # of going farther
CLOSE = 5e-3  # of the cost: as near as this to the best there can be is near enough
MOMENTS = 4  # at which the smallest plan is looked for
PAIRS = 2  # of plans are looked between


@dataclass(frozen=True, slots=True)
class CoarsePlan:
    choices: Choices  # of the best plan found; where none fits, of the smallest
    cost: float
    peak: Peak
    fits: bool
    hint: "PriceHint | None"
    visited: tuple[Choices, ...]  # plans on the way


@dataclass(frozen=True, slots=True)
class PriceHint:
    """What is much the same for all meshes: when memory is short, and what a byte is worth then, in seconds."""

    moment: Moment
    price: float


@dataclass(frozen=True, slots=True)
class SizedPlan:
    cost: float
    peak: Peak
    choices: Choices

    @property
    def nbytes(self) -> int:
        return self.peak.nbytes


def coarse_plan(tied: TiedPlans, limit: float | None, hint: PriceHint | None = None) -> CoarsePlan:
    """The best plan that is found soon."""
    return _CoarseSearch(tied, float("inf") if limit is None else limit).result(hint)


class _CoarseSearch:
    def __init__(self, tied: TiedPlans, limit: float) -> None:
        self.tied, self.limit = tied, limit
        self.visited: list[Choices] = []
        self.sized: dict[Choices, SizedPlan] = {}
        self.loads: dict[Moment, list[Table]] = {}
        self.bound = 0.0  # about what a plan that fits costs at least

    def result(self, hint: PriceHint | None) -> CoarsePlan:
        prices = [factor * hint.price for factor in AROUND] if hint else [0.0]
        fastest = self.solve_at(prices, hint.moment if hint else None)
        if fastest.cost == float("inf"):
            raise PlanError("search", "no combination of the choices that are left works", "loosen the pins")
        if fastest.nbytes > self.limit:
            hint = self.priced(fastest, hint)
            if not any(map(self.fits, self.sized.values())):
                self.smallest(hint.moment)
            for _, fast, good in sorted(self.pairs(), key=itemgetter(0))[:PAIRS]:
                self.mix(fast, good)
        plans = list(self.sized.values())
        fitting = list(filter(self.fits, plans))
        best = min(fitting, key=attrgetter("cost", "nbytes")) if fitting else min(plans, key=attrgetter("nbytes"))
        visited = tuple(map(self.tied.wide, (*self.visited, *self.sized)))
        return CoarsePlan(self.tied.wide(best.choices), best.cost, best.peak, bool(fitting), hint, visited)

    def fits(self, plan: SizedPlan) -> bool:
        return plan.nbytes <= self.limit

    def load(self, moment: Moment) -> list[Table]:
        if moment not in self.loads:
            self.loads[moment] = self.tied.load(moment)
        return self.loads[moment]

    def solve_at(self, prices: Sequence[float], moment: Moment | None) -> SizedPlan:
        """The best plan at the first of some prices, in rising order, of what is needed at a moment. Of the others
        only those on both sides of the limit are looked at more closely."""
        plans = self.tied.best(prices, self.load(moment) if moment is not None else [])
        self.visited += [choices for _, choices in plans]

        def sized(number: int) -> SizedPlan:
            plan = self.sized_plan(*plans[number])
            self.bound = max(self.bound, plan.cost + prices[number] * (plan.nbytes - self.limit))
            return plan

        first, low, high = sized(0), 0, len(plans)
        while high - low > 1 and not self.fits(first):
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(sized(middle)) else (middle, high)
        return first

    def sized_plan(self, cost: float, choices: Choices) -> SizedPlan:
        plan = self.sized.get(choices)  # once: there is much to hash
        if plan is None:
            plan = self.sized[choices] = SizedPlan(cost, self.tied.needed(choices), choices)
        return plan

    def priced(self, fastest: SizedPlan, hint: PriceHint | None) -> PriceHint:
        """Add plans on both sides of the limit, closer and closer to it. The last price is where they cost the same."""
        moment = fastest.peak.moment
        price = hint.price if hint else fastest.cost / fastest.nbytes
        if hint is not None and hint.moment.copy == moment.copy:
            moment = hint.moment  # hardly another one
        else:
            self.solve_at([factor * price for factor in (AROUND if hint else WIDE)], moment)
        for _ in range(ROUNDS):
            if not self.pairs():
                self.solve_at([factor * price for factor in FARTHER], moment)
                price *= FARTHER[-1]
        if pairs := self.pairs():
            mixed, fast, good = min(pairs, key=itemgetter(0))
            price = (good.cost - fast.cost) / (fast.nbytes - good.nbytes)
            if mixed > self.bound * (1 + CLOSE):
                self.solve_at([price], moment)
        return PriceHint(moment, price)

    def pairs(self) -> list[tuple[float, SizedPlan, SizedPlan]]:
        """A faster plan that does not fit with one that does, and what a mixture that just fits would cost."""
        found = []
        for good in filter(self.fits, self.sized.values()):
            for fast in self.sized.values():
                if not self.fits(fast) and fast.cost < good.cost:
                    share = (self.limit - good.nbytes) / (fast.nbytes - good.nbytes)
                    found.append((good.cost + share * (fast.cost - good.cost), fast, good))
        return found

    def smallest(self, moment: Moment) -> None:
        """Add plans that need little memory."""
        loads: dict[Moment, list[Table]] = {}
        while moment not in loads and len(loads) < MOMENTS:
            loads[moment] = self.load(moment)
            plan = self.sized_plan(*self.tied.frugal([t for load in loads.values() for t in load]))
            moment = plan.peak.moment

    def mix(self, fast: SizedPlan, good: SizedPlan) -> None:
        """As many copies as possible do as in the fast plan: each of them takes about as much more memory."""
        low, high = 0, max(map(len, self.tied.families), default=0)
        best, over, most = good, fast.nbytes, high
        while high - low > 1:
            share = (self.limit - best.nbytes) / (over - best.nbytes) if over > best.nbytes else 0.5
            some = min(max(low + int(share * (high - low)), low + 1), high - 1)
            choices = self.mixed(fast, good, some / most)
            peak = self.tied.needed(choices)
            if peak.nbytes <= self.limit:
                low, best = some, SizedPlan(float("nan"), peak, choices)
            else:
                high, over = some, peak.nbytes
        if low:
            self.sized[best.choices] = replace(best, cost=self.tied.cost(best.choices))

    def mixed(self, fast: SizedPlan, good: SizedPlan, share: float) -> Choices:
        choices = list(good.choices)
        for family in self.tied.families:
            for copy in family[: round(share * len(family))]:
                choices[copy] = fast.choices[copy]
        return tuple(choices)
