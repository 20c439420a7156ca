"""What a search is asked and what it answers: the interface of all engines.

An engine is a function from a `SearchProblem` to a `SearchResult`. It passes `checkpoint()` now and then, and when that
throws it out it answers with what it has: any bound holds, and any plan is one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tapas.search.monitor import LogEntry
from tapas.search.multi_objective import Load
from tapas.search.network import Network
from tapas.search.run_length import Choices
from tapas.search.solver import BUDGETS, SearchAnswer

WORK = 300_000  # points that are compared: about a second


@dataclass(frozen=True)
class EvaluatedChoices:
    choices: Choices
    cost: float
    amounts: tuple[float, ...]


@dataclass(frozen=True)
class Overrun:
    """Why a plan that keeps within the loads is none: it exceeds its limit by so much. The load says where, if one
    can."""

    excess: float
    load: Load | None


Referee = Callable[[Choices], Overrun | None]  # has the last word on a plan that keeps within the loads
Arrange = Callable[[Choices], Choices]  # a plan with its copies in an order that whoever looks at them likes best


def accept(choices: Choices) -> None:
    """A referee who has no objections."""


def as_they_are(choices: Choices) -> Choices:
    return choices


@dataclass(frozen=True)
class SearchProblem:
    """The cheapest plan of a network whose amounts are within the limits of all loads, and that the referee accepts.
    What he finds beyond a limit of his own becomes one more load."""

    network: Network
    loads: Sequence[Load] = ()
    referee: Referee = accept
    arrange: Arrange = as_they_are
    # prices and plans of an earlier search, with fewer loads or other limits, make for a good start
    prices: Sequence[float] = ()
    evaluated: Sequence[EvaluatedChoices] = ()
    # how long it may take
    solves: int | None = None  # searches at prices
    budgets: Sequence[int] = BUDGETS  # entries of the largest table
    work: int = WORK
    shown: bool = True  # to those who watch; or it is but a part of what they are waiting for


@dataclass(frozen=True)
class LeastOvershoot:
    """How far the limits are out of reach: the most that any load is above its limit."""

    plan: EvaluatedChoices
    overshoot: float  # of that plan
    bound: float  # of any plan


@dataclass(frozen=True)
class SearchResult:
    answer: SearchAnswer | None  # the plan and its bound; None: no plan within the limits was found
    amounts: tuple[float, ...] | None = None
    prices: tuple[float, ...] = ()  # cost per amount of each load, those that a referee named included
    evaluated: tuple[EvaluatedChoices, ...] = ()  # all plans met on the way, also those beyond the limits
    least_overshoot: LeastOvershoot | None = None  # where no plan within the limits was found
    infeasible: bool = False  # it is proven that there is none
    log: tuple[LogEntry, ...] = field(default=(), compare=False)  # what was known when


class Engine(Protocol):
    def __call__(self, problem: SearchProblem, /) -> SearchResult: ...
