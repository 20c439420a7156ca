"""Units and segments: how they divide over a mesh, and which tilings each factor should offer, found by carrying units
and cuts through the graph.

A view of 1600 features as 25 heads of 64 needs whole heads; a split into Q, K and V needs each third
split by itself. The linear layer before them does not care, so it has to be told: units and cuts
travel along factors, from dim to dim, until nothing new is learnt.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise
from math import lcm, prod

from tapas.ir.graph import Op
from tapas.rules.base import At, Call, Factor, Rule
from tapas.rules.dim_roles import Dim, joined_dims, places
from tapas.sharding.layout import Tiling

MOST = 3  # tilings kept for a dim beside the plain one
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
    segments, offset, cuts = [], 0, {0}
    for length, unit in tiling or ((size, 1),):
        if start <= offset and offset + length <= stop:
            segments.append((length, unit))
        offset += length
        cuts.add(offset)
    return tuple(segments) if {start, stop} <= cuts else None


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
    segments = []
    for length, unit in _once(tiling, at.repeat):
        unit = lcm(unit, at.inner)
        if length % unit:
            return None
        segments.append((length // at.inner, unit // at.inner))
    return tuple(segments)


def _once(tiling: Tiling, repeat: int) -> Tiling:
    """One of the equal parts of a tiling; what is not made of equal parts keeps a length that fits nothing."""
    if len(tiling) == 1:
        length, unit = tiling[0]
        return ((length // repeat, unit),) if length % repeat == 0 else ((1, 2),)
    part = tiling[: len(tiling) // repeat]
    return part if part * repeat == tiling else ((1, 2),)


def refine(first: Tiling, second: Tiling) -> Tiling:
    """The common refinement of two tilings of one dim."""
    cuts = {0}
    for tiling in (first, second):
        cuts.update(accumulate(length for length, _ in tiling))

    def unit_at(tiling: Tiling, point: int) -> int:
        offset = 0
        for length, unit in tiling:
            offset += length
            if point < offset:
                return unit
        return 1

    merged = []
    for start, stop in pairwise(sorted(cuts)):
        unit = lcm(unit_at(first, start), unit_at(second, start))
        merged.append((stop - start, unit if (stop - start) % unit == 0 else 1))
    return tuple(merged)


class Tilings:
    """What is known so far about the dims of all tensors."""

    def __init__(
        self, calls: Sequence[tuple[Op, Call, Rule]], divisibility: Divisibility, weights: Collection[str] | None = None
    ) -> None:
        self.divisibility, self.calls = divisibility, calls
        self._places: dict[tuple[int, str], list[tuple[str, At]]] = {}
        self.joined = joined_dims((op, rule) for op, _, rule in calls)
        self.packable = None
        if weights is not None:  # segments pay where they reach a weight that is stored packed
            dims = [(t.name, d) for _, call, _ in calls for t in call.operands for d in range(len(t.shape))]
            self.packable = {self.joined.find(dim) for dim in dims if dim[0] in weights}
        self.dims: dict[Dim, list[Tiling]] = defaultdict(list)
        self.touching: dict[str, set[int]] = defaultdict(set)
        for index, (op, _, _) in enumerate(calls):
            for name in (*op.operands, *op.results):
                self.touching[name].add(index)

    def places(self, index: int, factor: Factor) -> list[tuple[str, At]]:
        key = index, factor.name
        if key not in self._places:
            self._places[key] = places(self.calls[index][0], factor)
        return self._places[key]

    def of_factor(self, index: int, factor: Factor) -> list[Tiling]:
        """The tilings a factor should offer, in its units; the plain one first."""
        whole: list[Tiling] = [()]
        sections: dict[tuple[int, int], Tiling] = {}
        for name, at in self.places(index, factor):
            stop = factor.size if at.stop is None else at.stop
            if (at.start, stop) != (0, factor.size):
                sections.setdefault((at.start, stop), ((stop - at.start, 1),))
            for tiling in self.dims[name, at.dim]:
                lifted = lift(at, tiling)
                if lifted is None:
                    continue
                if (at.start, stop) == (0, factor.size):
                    whole.append(lifted)
                else:
                    sections[at.start, stop] = lifted
        if sections:
            name, at = self.places(index, factor)[0]
            if not self.packs(name, at.dim):
                return []
            packed = ((factor.size, 1),)
            for (start, stop), part in sections.items():
                rest = ((start, 1),) if start else ()
                tail = ((factor.size - stop, 1),) if stop < factor.size else ()
                packed = refine(packed, (*rest, *part, *tail))
            whole = [packed] + [refine(packed, t) for t in whole if len(t) > 1]
        return [t for t in dict.fromkeys(whole) if self.useful(t)]

    def packs(self, name: str, dim: int) -> bool:
        return self.packable is None or self.joined.find((name, dim)) in self.packable

    def useful(self, tiling: Tiling) -> bool:
        return all(self.divisibility.enough(length // unit) for length, unit in tiling)

    def learn(self, name: str, dim: int, size: int, tiling: Tiling) -> bool:
        """Add a tiling to a dim; several segments merge into one tiling that serves all."""
        tiling = canonical(size, tiling, self.divisibility)
        known = self.dims[name, dim]
        if not tiling or tiling in known or not self.useful(tiling):
            return False
        if len(tiling) > 1:
            if not self.packs(name, dim):
                return False
            packed = next((t for t in known if len(t) > 1), None)
            if packed is not None:
                merged = refine(packed, tiling)
                if merged == packed or not self.useful(merged):
                    return False
                known[known.index(packed)] = merged
                return True
        elif sum(len(t) == 1 for t in known) >= MOST:
            return False
        known.append(tiling)
        return True

    def settle(self) -> None:
        waiting = dict.fromkeys(range(len(self.calls)))
        while waiting:
            index = next(iter(waiting))
            del waiting[index]
            _, call, rule = self.calls[index]
            shapes = {t.name: t.shape for t in (*call.operands, *call.results)}
            for factor in rule.factors:
                if factor.blocked or factor.after or factor.joint or factor.least or factor.size < 2:
                    continue
                for tiling in self.of_factor(index, factor):
                    for name, at in self.places(index, factor):
                        tiles = lower(at, tiling, factor.size)
                        if tiles is not None and self.learn(name, at.dim, shapes[name][at.dim], tiles):
                            waiting.update(dict.fromkeys(self.touching[name]))


def find_tilings(
    calls: Sequence[tuple[Op, Call, Rule]], divisibility: Divisibility, weights: Collection[str] | None = None
) -> tuple[list[dict[str, list[Tiling]]], Mapping[Dim, list[Tiling]]]:
    """Per call, the tilings of each factor; and those of each dim (beside the plain split)."""
    tilings = Tilings(calls, divisibility, weights)
    tilings.settle()
    per_call = [
        {
            f.name: [()] if f.after or f.joint or f.least else tilings.of_factor(i, f)
            for f in rule.factors
            if not f.blocked
        }
        for i, (_, _, rule) in enumerate(calls)
    ]
    return per_call, tilings.dims
