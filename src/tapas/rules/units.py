"""Units and segments: how they divide over a mesh, and the tilings of factors as those of dims and back."""

from dataclasses import dataclass, field
from itertools import combinations
from math import lcm, prod

from tapas.rules.base import At
from tapas.sharding.layout import Tiling

Question = tuple[str, int]


@dataclass(frozen=True)
class Divisibility:
    """How units divide over the axes of a mesh, with a record of what was asked: on another mesh with the same answers
    an operator has the same options."""

    mesh: tuple[int, ...]
    answers: dict[Question, bool] = field(default_factory=dict, compare=False)

    def uneven(self, units: int) -> bool:
        """Whether axes with no more devices than there are units cannot deal them out evenly."""
        return self._ask(("uneven", units))

    def enough(self, units: int) -> bool:
        """Whether there is one for every device of the smallest axis."""
        return self._ask(("enough", units))

    def holds_on(self, mesh: tuple[int, ...]) -> bool:
        """Whether another mesh answers everything that was asked in the same way."""
        return all(_answer(mesh, *question) == answer for question, answer in self.answers.items())

    def _ask(self, question: Question) -> bool:
        if question not in self.answers:
            self.answers[question] = _answer(self.mesh, *question)
        return self.answers[question]


def _answer(mesh: tuple[int, ...], what: str, units: int) -> bool:
    axes = [n for n in mesh if n > 1]
    if what == "enough":
        return units >= min(axes, default=1)
    sets = (some for many in range(1, len(axes) + 1) for some in combinations(axes, many))
    return any(prod(some) <= units and units % prod(some) for some in sets)


def canonical(size: int, tiling: Tiling, divisibility: Divisibility) -> Tiling:
    """() where a tiling splits a dim exactly like the plain split on every set of axes it allows."""
    if len(tiling) != 1 or tiling[0][1] == 1:
        return () if len(tiling) == 1 else tiling
    return tiling if divisibility.uneven(size // tiling[0][1]) else ()


def section(tiling: Tiling, size: int, start: int, stop: int) -> Tiling | None:
    """The part of a factor's tiling between two of its cuts, or None if they are not cuts."""
    found, offset, cuts = [], 0, {0}
    for length, unit in tiling or ((size, 1),):
        if start <= offset and offset + length <= stop:
            found.append((length, unit))
        offset += length
        cuts.add(offset)
    return tuple(found) if {start, stop} <= cuts else None


def minor(at: At, dim_size: int) -> Tiling:
    """The tiling of the dim that a minor factor sits in. Around it are units of its majors, each of which outer axes
    have for themselves: dealt out are all units of the dim, as large as those of the factor."""
    return ((dim_size, at.inner),)


def lower(at: At, tiling: Tiling, size: int) -> Tiling | None:
    """A major factor's tiling as the tiling of the dim it sits in; None if it cannot be."""
    stop = size if at.stop is None else at.stop
    part = section(tiling, size, at.start, stop)
    if part is None:
        return None
    return tuple((length * at.inner, unit * at.inner) for length, unit in part) * at.repeat


def lift(at: At, tiling: Tiling) -> Tiling | None:
    """The tiling of a dim as that of the factor (or of the section of it) that sits in the dim."""
    found = []
    for length, unit in _once(tiling, at.repeat):
        unit = lcm(unit, at.inner)
        if length % unit:
            return None
        found.append((length // at.inner, unit // at.inner))
    return tuple(found)


def _once(tiling: Tiling, repeat: int) -> Tiling:
    """One of the equal parts of a tiling; what is not made of equal parts keeps a length that fits nothing."""
    if len(tiling) == 1:
        length, unit = tiling[0]
        return ((length // repeat, unit),) if length % repeat == 0 else ((1, 2),)
    part = tiling[: len(tiling) // repeat]
    return part if part * repeat == tiling else ((1, 2),)
