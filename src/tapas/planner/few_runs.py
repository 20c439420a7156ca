"""Of plans that take hardly longer, the one whose layers do the same in the fewest runs.

A plan that uses its memory up mixes what layers do until the last byte is spent. That saves little and is hard to read:
"layers 0 to 68, 69 to 78 and 79" is worth less than a thousandth of the time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tapas.planner.fit import LimitedProblem, LimitedSearch
from tapas.planner.solution import Solution
from tapas.search import Choices, copies_alike, cost_of, run_lengths

SLIGHTLY = 1e-3  # relative: what fewer runs may cost


@dataclass(frozen=True)
class Simplified:
    """A plan of fewer runs, and the faster one that it stands for."""

    solution: Solution
    runs: int
    faster: float | None = None  # seconds of a step; None: it is that plan
    faster_runs: int = 0

    @property
    def said(self) -> dict[str, float]:
        """What a plan keeps of it."""
        return {} if self.faster is None else {"cost": self.faster, "runs": self.runs, "instead_of": self.faster_runs}


def best_with_fewest_runs(limits: LimitedProblem) -> Simplified:
    return with_fewest_runs(limits, limits.best())


def with_fewest_runs(limits: LimitedProblem, found: Solution) -> Simplified:
    """Runs are joined one by one, always where that costs least, as long as the plan keeps within the memory and costs
    hardly more."""
    search = limits.fitting()
    best, cost = found.answer.choices, found.answer.cost
    before = runs = count_runs(search, best)
    if limits.limit is None or runs == len(search.families):
        return Simplified(found, runs)
    while True:
        joined = {choices: _cost(search, choices) for choices in dict.fromkeys(_joined(search, best))}
        simpler = [
            (count_runs(search, choices), seconds, number, choices)
            for number, (choices, seconds) in enumerate(joined.items())
            if seconds <= found.answer.cost * (1 + SLIGHTLY) and _fits(search, choices, limits.limit)
        ]
        if not simpler or min(simpler)[0] >= runs:
            break
        runs, cost, _, best = min(simpler)
    if runs == before:
        return Simplified(found, runs)
    alike = copies_alike(search.network, search.narrowed(best))
    answer = replace(found.answer, choices=best, cost=cost, bound=min(found.answer.bound, cost), alike=alike)
    return Simplified(Solution(found.problem, answer), runs, found.answer.cost, before)


def count_runs(search: LimitedSearch, choices: Choices) -> int:
    return sum(len(run_lengths([choices[c] for c in copies])) for copies in search.families)


def _joined(search: LimitedSearch, choices: Choices) -> Iterator[Choices]:
    """Plans in which a run does what the one before it, or the one behind it, does."""
    for copies in search.families:
        first = 0
        runs = run_lengths([choices[c] for c in copies])
        for number, (_, times) in enumerate(runs):
            for neighbour in {number - 1, number + 1} & set(range(len(runs))):
                yield _with(choices, copies[first : first + times], runs[neighbour][0])
            first += times


def _with(choices: Choices, copies: Sequence[int], own: tuple[int, ...]) -> Choices:
    changed = list(choices)
    for copy in copies:
        changed[copy] = own
    return tuple(changed)


def _cost(search: LimitedSearch, choices: Choices) -> float:
    return cost_of(search.network, search.narrowed(choices)) if search.allowed(choices) else float("inf")


def _fits(search: LimitedSearch, choices: Choices, limit: float) -> bool:
    return search.memory.needed(choices, search.families).nbytes <= limit
