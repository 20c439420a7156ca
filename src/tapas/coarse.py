"""A good plan that fits into memory, fast and without proof: to compare many meshes.

A few searches at prices for memory find plans on both sides of the limit, all copies of a block alike. The best
plan mostly lies between two of them: some copies do as the one, the others as the other.
"""

from dataclasses import dataclass, replace

from tapas.fitting import DoesNotFit, Fitting, search
from tapas.memory import Peak
from tapas.search import Answer, cost_of, solve
from tapas.search.measures import measured
from tapas.search.network import Choices

SOLVES = 6  # searches at prices
FARTHER = 4.0  # times the price, as long as all plans are on one side of the limit
PAIRS = 2  # of plans are looked between


@dataclass(frozen=True)
class Coarse:
    answer: Answer  # the best plan found; its bound says nothing
    peak: Peak
    price: float  # of a byte of memory, in seconds
    met: tuple[Choices, ...]  # plans met on the way


def coarse(fitting: Fitting, limit: float | None, price: float = 0.0) -> Coarse:
    """The best plan that is found soon; DoesNotFit if none is. What memory costs elsewhere makes for a good start."""
    fastest = _fastest(fitting)
    peak = fitting.needed(fastest.choices)
    if limit is None or peak.nbytes <= limit:
        answer = _wide(fitting, fastest)
        return Coarse(answer, peak, 0.0, (answer.choices,))
    sized = [(fastest.cost, peak.nbytes, fastest.choices)]
    price = _priced(fitting, sized, peak, limit, price)
    if not any(nbytes <= limit for _, nbytes, _ in sized):
        least, bound = fitting.smallest
        if least.nbytes > limit:
            raise DoesNotFit(limit, least, bound)
        sized += [(cost_of(fitting.network, c), fitting.needed(c).nbytes, c) for c in fitting.seen]
    cost, _, choices = min(p for p in [*sized, *_between(fitting, sized, limit)] if p[1] <= limit)
    answer = _wide(fitting, Answer(choices, cost, float("-inf"), False))
    met = tuple(fitting.problem.widened(c, fitting.rows) for _, _, c in sized)
    return Coarse(answer, fitting.needed(choices), price, met)


Sized = tuple[float, int, Choices]  # cost, bytes, choices


def _fastest(fitting: Fitting) -> Answer:
    """However much memory that takes."""
    answer = search(fitting.problem, fitting.rows).answer
    return replace(answer, choices=fitting.narrowed(answer.choices))


def _wide(fitting: Fitting, answer: Answer) -> Answer:
    return replace(answer, choices=fitting.problem.widened(answer.choices, fitting.rows))


def _priced(fitting: Fitting, sized: list[Sized], peak: Peak, limit: float, price: float) -> float:
    """Add the plans that are best at some prices of the memory that the fastest plan has too little of. The last
    price is where plans on both sides of the limit cost the same."""
    load = fitting.memory.load(peak.moment, limit, fitting.rows)
    if load is None:
        return price
    part = measured(fitting.network, (load,), sized[0][0])
    price = price or sized[0][0] / peak.nbytes
    for _ in range(SOLVES):
        answer = solve(part.weighted([1.0, price * part.units[1] / part.units[0]]))
        found = cost_of(fitting.network, answer.choices), fitting.needed(answer.choices).nbytes, answer.choices
        if found in sized:
            break
        sized.append(found)
        best = min(_pairs(sized, limit), default=None)
        if best is not None:
            _, fast, good = best
            price = (good[0] - fast[0]) / (fast[1] - good[1])
        else:
            price *= FARTHER if found[1] > limit else 1 / FARTHER
    return price


def _pairs(sized: list[Sized], limit: float) -> list[tuple[float, Sized, Sized]]:
    """A faster plan that does not fit with one that does, and what a mixture that just fits would cost."""
    pairs = []
    for good in (p for p in sized if p[1] <= limit):
        for fast in (p for p in sized if p[1] > limit and p[0] < good[0]):
            share = (limit - good[1]) / (fast[1] - good[1])
            pairs.append((good[0] + share * (fast[0] - good[0]), fast, good))
    return pairs


def _between(fitting: Fitting, sized: list[Sized], limit: float) -> list[Sized]:
    found = []
    for _, fast, good in sorted(_pairs(sized, limit))[:PAIRS]:
        found += _mixed(fitting, fast[2], good[2], limit)
    return found


def _mixed(fitting: Fitting, fast: Choices, good: Choices, limit: float) -> list[Sized]:
    """As many copies as possible do as in the fast plan: how many, by bisection."""
    low, high, found = 0, max(map(len, fitting.families), default=0), []
    most = high
    while low < high:
        some = (low + high + 1) // 2
        choices = list(good)
        for family in fitting.families:
            for copy in family[: some * len(family) // most]:
                choices[copy] = fast[copy]
        mixture = tuple(choices)
        nbytes = fitting.needed(mixture).nbytes
        if nbytes <= limit:
            low = some
            found.append((cost_of(fitting.network, mixture), nbytes, mixture))
        else:
            high = some - 1
    return found
