"""The plan whose largest load is as small as can be. Loads have shares that add up to one: what their mean comes to at
least, at any shares, is a bound for the largest of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tapas.search.engine import Arrange, as_they_are
from tapas.search.mixture_program import Goal, mixture_of_rows, relaxed_mixture
from tapas.search.monitor import Stopped
from tapas.search.multi_objective import Load, MultiObjectiveNetwork, multi_objective
from tapas.search.network import Network, original_choices
from tapas.search.rows import known_rows
from tapas.search.run_length import Choices
from tapas.search.solver import solve

ROUNDS = 6  # searches, at most, of either kind
NEAR = 1e-3  # relative: so close to the bound that another search is not worth it
TOLERANCE = 1e-5  # in the unit of the loads

LargestLoad = Callable[[Choices], tuple[float, Load | None]]  # how large, and which one it is, if that can be said


@dataclass(frozen=True)
class LeastLoad:
    choices: tuple[Choices, ...]  # of all plans met on the way, the best one first; none if no plan works
    bound: float


def least_largest_load(
    network: Network, first: Load, largest: LargestLoad, arrange: Arrange = as_they_are
) -> LeastLoad:
    """Loads are named by `largest` as they are needed: there may be many, and few ever matter. Limits do not.

    >>> from tapas.search import BlockCopy, BlockNetwork, table
    >>> block = BlockNetwork((3,), 1, (table((0,), np.zeros(3)),))
    >>> one, other = (Load(((table((0,), np.array(a)),),), 0.0) for a in ([1.0, 2.0, 9.0], [9.0, 3.0, 1.0]))
    >>> network = Network((block,), [BlockCopy(0, ())])
    >>> def largest(choices):
    ...     return max((load.amount(network, choices), load) for load in (one, other))
    >>> least_largest_load(network, one, largest).choices[0]
    ((1,),)
    """
    search = _MinimaxSearch(network, [first], largest, arrange)
    try:
        if not search.run():
            return LeastLoad((), np.inf)
    except Stopped:
        pass  # what there is by now
    return LeastLoad(tuple(sorted(search.plans, key=lambda choices: search.plans[choices])), search.bound)


@dataclass
class _MinimaxSearch:
    network: Network
    loads: list[Load]
    largest: LargestLoad
    arrange: Arrange
    plans: dict[Choices, float] = field(default_factory=dict[Choices, float])  # with their largest loads
    bound: float = -np.inf

    def run(self) -> bool:
        """Whether there is any plan."""
        named = 0
        while named < len(self.loads) <= ROUNDS:  # all of them alike: a plan that is small in all is soon met
            named = len(self.loads)
            if not self.look(np.full(named, 1 / named)):
                return False
        for _ in range(ROUNDS):
            self.mix()
            relaxed = relaxed_mixture(self.objectives, self.goal, self.plans)
            assert relaxed is not None  # any mixture has some excess
            if min(self.best, relaxed.cost * self.unit) <= self.bound * (1 + NEAR):
                break
            self.look(relaxed.prices)
        return True

    @property
    def best(self) -> float:
        return min(self.plans.values())

    @property
    def objectives(self) -> MultiObjectiveNetwork:
        """The loads alone."""
        return multi_objective(self.network, self.loads, 1.0).select(range(1, 1 + len(self.loads)))

    @property
    def unit(self) -> float:
        return max(self.objectives.units)

    @property
    def goal(self) -> Goal:
        return Goal(np.zeros(len(self.loads)), TOLERANCE, np.array(self.objectives.units) / self.unit)

    def evaluate(self, choices: Choices) -> None:
        if choices not in self.plans:
            self.plans[choices], load = self.largest(choices)
            if load is not None and not any(load is other for other in self.loads):
                self.loads.append(load)

    def look(self, shares: np.ndarray) -> bool:
        """Search for the plan with the least mean; whether there is any plan."""
        objectives, unit = self.objectives, self.unit
        answer = solve(objectives.weighted((shares * np.array(objectives.units) / unit).tolist()), alike=False)
        if answer.cost < np.inf:
            self.bound = max(self.bound, answer.bound * unit)
            self.evaluate(answer.choices)
        return answer.cost < np.inf

    def mix(self) -> None:
        """The best that blocks can do by turns, each as in some plan."""
        objectives = self.objectives
        known = known_rows(objectives.network, self.plans)
        mixture = mixture_of_rows(objectives.restricted(known.domains), self.goal, known.rows)
        if mixture.choices is not None:
            self.evaluate(self.arrange(original_choices(objectives.network, known.domains, mixture.choices)))
