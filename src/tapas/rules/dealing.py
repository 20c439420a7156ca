"""What a mesh is asked about units that are to be dealt out over its axes, while options are looked for."""

from dataclasses import dataclass, field
from itertools import combinations
from math import prod

Question = tuple[str, int]


@dataclass(frozen=True)
class Dealing:
    """Whoever asks the same of another mesh, and hears the same, finds the same."""

    mesh: tuple[int, ...]
    heard: dict[Question, bool] = field(default_factory=dict, compare=False)

    def uneven(self, units: int) -> bool:
        """Whether axes with no more devices than there are units cannot deal them out evenly."""
        return self._ask(("uneven", units))

    def enough(self, units: int) -> bool:
        """Whether there is one for every device of the smallest axis."""
        return self._ask(("enough", units))

    def like(self, mesh: tuple[int, ...]) -> bool:
        """Whether another mesh answers everything that was asked in the same way."""
        return all(_answer(mesh, *question) == answer for question, answer in self.heard.items())

    def _ask(self, question: Question) -> bool:
        if question not in self.heard:
            self.heard[question] = _answer(self.mesh, *question)
        return self.heard[question]


def _answer(mesh: tuple[int, ...], what: str, units: int) -> bool:
    axes = [n for n in mesh if n > 1]
    if what == "enough":
        return units >= min(axes, default=1)
    sets = (some for many in range(1, len(axes) + 1) for some in combinations(axes, many))
    return any(prod(some) <= units and units % prod(some) for some in sets)
