"""From a rule to what an operator may do on a mesh: options along one axis, choices over all axes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import lcm

from tapas.rules.base import At, Call, Factor, Kernel, Rule
from tapas.rules.dealing import Dealing
from tapas.sharding.layout import B, Layout, P, R, S, State, Tiling


@dataclass(frozen=True, slots=True)
class Option:
    """What an operator may do along one axis: a factor's name, or R, B (whole) or P0, P1, ...
    (partial sums pass through a group of linear operands)."""

    name: str
    operands: tuple[State, ...]
    results: tuple[State, ...]
    tiling: Tiling = ()  # of the factor, in units
    factor: Factor | None = None

    @property
    def count(self) -> int:
        """How many units may be dealt out: the fewest of any segment."""
        if self.factor is None:
            return 0
        return min(length // unit for length, unit in self.tiling or ((self.factor.size, 1),))

    def __str__(self) -> str:
        from tapas.sharding.layout import tiling_text

        return self.name + (f"|{tiling_text(self.tiling)}" if self.tiling else "")


@dataclass(frozen=True, slots=True)
class Choice:
    """One option per axis, and the layouts around the operator that follow."""

    options: tuple[Option, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(option.name for option in self.options)

    def operand(self, index: int) -> Layout:
        return tuple(option.operands[index] for option in self.options)

    def result(self, index: int) -> Layout:
        return tuple(option.results[index] for option in self.options)

    def __str__(self) -> str:
        return ", ".join(map(str, self.options))


def canonical(size: int, tiling: Tiling, dealing: Dealing) -> Tiling:
    """() where a tiling splits a dim exactly like the plain split on every set of axes it allows."""
    if len(tiling) != 1 or tiling[0][1] == 1:
        return () if len(tiling) == 1 else tiling
    return tiling if dealing.uneven(size // tiling[0][1]) else ()


def section(tiling: Tiling, size: int, start: int, stop: int) -> Tiling | None:
    """The part of a factor's tiling between two of its cuts, or None if they are not cuts."""
    found, offset, cuts = [], 0, {0}
    for length, unit in tiling or ((size, 1),):
        if start <= offset and offset + length <= stop:
            found.append((length, unit))
        offset += length
        cuts.add(offset)
    return tuple(found) if {start, stop} <= cuts else None


def lower(at: At, tiling: Tiling, size: int) -> Tiling | None:
    """A factor's tiling as the tiling of the dim it sits in; None if it cannot be."""
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


def _states(
    places: Sequence[At | None],
    tensors: Sequence,
    otherwise: Sequence[State],
    tiling: Tiling,
    size: int,
    dealing: Dealing,
) -> tuple[State, ...] | None:
    states = []
    for at, tensor, absent in zip(places, tensors, otherwise, strict=True):
        if at is None:
            states.append(absent)
            continue
        tiles = lower(at, tiling, size)
        if tiles is None:
            return None
        states.append(S(at.dim, canonical(tensor.shape[at.dim], tiles, dealing)))
    return tuple(states)


def _plain(states: tuple[State, ...], tensors: Sequence) -> tuple[State, ...]:
    """A tensor without a gradient has no use for B: it is R."""
    return tuple(R if s == B and not t.differentiable else s for s, t in zip(states, tensors, strict=True))


def _absent(factor: Factor, call: Call) -> tuple[list[State], list[State]]:
    kernel = factor.kernel or Kernel()
    operands: list[State] = [B] * len(call.operands)
    results: list[State] = [P] * len(call.results)
    for states, override in ((operands, kernel.operands), (results, kernel.results)):
        for index, kind in enumerate(override):
            if kind is not None:
                states[index] = State(kind)
    return operands, results


def options(rule: Rule, call: Call, tilings: Mapping[str, Sequence[Tiling]], dealing: Dealing) -> list[Option]:
    """Everything an operator may do along one axis of this mesh, whole in two ways first."""
    found: dict[tuple, Option] = {}

    def add(option: Option) -> None:
        option = Option(
            option.name, _plain(option.operands, call.operands), _plain(option.results, call.results),
            option.tiling, option.factor,
        )  # fmt: skip
        found.setdefault((option.name, option.operands, option.results), option)

    operands, results = len(call.operands), len(call.results)
    add(Option("R", (R,) * operands, (R,) * results))
    if any(t.differentiable for t in (*call.operands, *call.results)):
        add(Option("B", (B,) * operands, (B,) * results))
    for number, group in enumerate(rule.linear):
        if "bool" in {t.dtype for t in (*(call.operands[i] for i in group), *call.results)}:
            continue  # truth values have no partial sums
        inputs = tuple(P if i in group else B for i in range(operands))
        add(Option(f"P{number}", inputs, (P,) * results))
    for factor in rule.factors:
        if factor.blocked or factor.size < 2:
            continue
        absent = _absent(factor, call)
        for tiling in tilings.get(factor.name, ((),)):
            inputs = _states(factor.operands, call.operands, absent[0], tiling, factor.size, dealing)
            outputs = _states(factor.results, call.results, absent[1], tiling, factor.size, dealing)
            if inputs is not None and outputs is not None:
                add(Option(factor.name, inputs, outputs, tiling, factor))
    return list(found.values())


def choices(available: Sequence[Option], mesh: tuple[int, ...]) -> list[Choice]:
    """All combinations over the axes that the runtime can execute."""
    return [Choice(combo) for combo in product(available, repeat=len(mesh)) if legal(combo, mesh)]


def clash(one: Option, two: Option) -> bool:
    """Two factors in one dim of a tensor have to nest, and to cut it in the same way."""
    assert one.factor is not None and two.factor is not None
    nested = one.name == two.name or one.name in two.factor.after or two.name in one.factor.after
    return any(
        a.sharded and b.sharded and a.dim == b.dim and (a.tiling != b.tiling or not nested)
        for a, b in zip((*one.operands, *one.results), (*two.operands, *two.results), strict=True)
    )


def legal(combo: Sequence[Option], mesh: tuple[int, ...]) -> bool:
    if any(n == 1 and option.name != "R" for option, n in zip(combo, mesh, strict=True)):
        return False  # an axis of one device splits nothing
    if any(clash(one, two) for one, two in combinations([o for o in combo if o.factor is not None], 2)):
        return False
    split: dict[str, int] = {}
    tiling: dict[str, Tiling] = {}
    for option, n in zip(combo, mesh, strict=True):
        factor = option.factor
        if factor is None:
            continue
        if any(split.get(major.name, 1) < major_size for major, major_size in _majors(factor, combo)):
            return False
        if len(factor.after) > len(_majors(factor, combo)):
            return False  # a major factor that is not split at all
        if tiling.setdefault(option.name, option.tiling) != option.tiling:
            return False
        split[option.name] = split.get(option.name, 1) * n
        if split[option.name] > option.count:
            return False
    return True


def _majors(factor: Factor, combo: Sequence[Option]) -> list[tuple[Factor, int]]:
    names = {o.name: o.factor for o in combo if o.factor is not None}
    return [(f, f.size) for name in factor.after if (f := names.get(name)) is not None]
