"""What a search within limits comes to."""

from dataclasses import dataclass

from tapas.search.folded import SearchAnswer
from tapas.search.network import Choices


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
    answer: SearchAnswer | None  # None: no plan within the limits was found
    amounts: tuple[float, ...] | None
    prices: tuple[float, ...]  # cost per amount
    evaluated: tuple[EvaluatedChoices, ...]  # all plans met on the way, also those beyond the limits
    least_overshoot: LeastOvershoot | None  # where no plan within the limits was found
    infeasible: bool  # it is proven that there is none
