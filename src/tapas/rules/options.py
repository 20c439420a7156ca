"""From a rule to what an operator may do along one axis of a mesh; a choice is one option per axis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapas.rules.base import At, Call, Factor, Kernel, Rule
from tapas.rules.units import Divisibility, canonical, lower, minor
from tapas.sharding.layout import B, Layout, P, R, S, State, Tiling, tiling_text


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


def _states(
    factor: Factor,
    places: Sequence[At | None],
    tensors: Sequence,
    otherwise: Sequence[State],
    tiling: Tiling,
    divisibility: Divisibility,
) -> tuple[State, ...] | None:
    states = []
    for at, tensor, absent in zip(places, tensors, otherwise, strict=True):
        if at is None:
            states.append(absent)
            continue
        size = tensor.shape[at.dim]
        tiles = minor(at, size) if factor.after else lower(at, tiling, factor.size)
        if tiles is None:
            return None
        states.append(S(at.dim, canonical(size, tiles, divisibility)))
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


def options(
    rule: Rule, call: Call, tilings: Mapping[str, Sequence[Tiling]], divisibility: Divisibility
) -> list[Option]:
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
            inputs = _states(factor, factor.operands, call.operands, absent[0], tiling, divisibility)
            outputs = _states(factor, factor.results, call.results, absent[1], tiling, divisibility)
            if inputs is not None and outputs is not None:
                add(Option(factor.name, inputs, outputs, tiling, factor))
    return list(found.values())


def clash(one: Option, two: Option) -> bool:
    """Two factors in one dim of a tensor have to nest, and to cut it in the same way."""
    assert one.factor is not None and two.factor is not None
    nested = one.name == two.name or one.name in two.factor.after or two.name in one.factor.after
    return any(
        a.sharded and b.sharded and a.dim == b.dim and (a.tiling != b.tiling or not nested)
        for a, b in zip((*one.operands, *one.results), (*two.operands, *two.results), strict=True)
    )
