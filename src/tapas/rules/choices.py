"""From a rule to what an operator may do along one axis of a mesh, and from these options to its choices: the
combinations over all axes that the runtime can execute, and the layouts that come with them. They are the same on all
meshes that divide its units over the same axes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tapas.rules.base import At, Call, Factor, Kernel, Rule
from tapas.rules.tiling import Divisibility, canonical, lower, minor
from tapas.sharding.layout import B, Layout, P, R, S, State, Tiling, tiling_text
from tapas.sharding.layout_grid import LayoutGrid, axis_combinations, axis_set_devices, axis_sets_within


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

    @property
    def capacity(self) -> float:
        """Of the buffers that are sent, if these have one."""
        return self.factor.kernel.capacity if self.factor is not None and self.factor.kernel is not None else 0.0

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
    factor: Factor, places: Sequence[At | None], tensors: Sequence, otherwise: Sequence[State], tiling: Tiling,
    divisibility: Divisibility,
) -> tuple[State, ...] | None:  # fmt: skip
    states = []
    for at, tensor, absent in zip(places, tensors, otherwise, strict=True):
        if at is None:
            states.append(absent)
            continue
        size = tensor.shape[at.dim]
        if factor.least:  # equal shares are those of the plain split
            states.append(S(at.dim))
            continue
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
    distinct: dict[tuple, Option] = {}

    def add(option: Option) -> None:
        option = Option(
            option.name, _plain(option.operands, call.operands), _plain(option.results, call.results),
            option.tiling, option.factor,
        )  # fmt: skip
        distinct.setdefault((option.name, option.operands, option.results), option)

    operands, results = len(call.operands), len(call.results)
    add(Option("R", (R,) * operands, (R,) * results))
    if any(t.differentiable for t in (*call.operands, *call.results)) and not rule.own_gradient:
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
    return list(distinct.values())


@dataclass(frozen=True)
class ChoiceTable:
    """The choices of an operator on one mesh, numbered."""

    options: tuple[Option, ...]
    combos: np.ndarray  # [choice, axis] -> option
    layouts: tuple[np.ndarray, ...]  # of each operand and result: [choice] -> layout number
    masks: dict[int, np.ndarray]  # option that splits a factor -> [choice] -> the axes that do it, a bit for each

    def __len__(self) -> int:
        return len(self.combos)

    def __getitem__(self, index: int) -> Choice:
        return Choice(tuple(self.options[o] for o in self.combos[index]))

    @property
    def splits(self) -> Iterator[tuple[np.ndarray, Option]]:
        """The options that split a factor, each with the axes that do it under each choice."""
        return ((mask, self.options[number]) for number, mask in self.masks.items())


class OperatorChoices:
    """The choices of an operator on any mesh."""

    def __init__(self, options: Sequence[Option]) -> None:
        self.options = tuple(options)
        self.split = {number: o for number, o in enumerate(options) if o.factor is not None}
        self.factors = {o.name: o.factor for o in self.split.values() if o.factor is not None}
        pairs = combinations(self.split.items(), 2)
        self.clashing = [(i, j) for (i, one), (j, two) in pairs if _exclusive(one, two)]
        after = {major for factor in self.factors.values() for major in factor.after if major in self.factors}
        # all that choices depend on of the sizes of a mesh
        self.units = sorted({o.count for o in self.split.values()} | {self.factors[major].size - 1 for major in after})
        self._tables: dict[tuple, ChoiceTable] = {}

    def on(self, mesh: tuple[int, ...], grids: Sequence[LayoutGrid]) -> ChoiceTable:
        """The choices on a mesh with such layouts of the operands and results."""
        even = (tuple(map(factor.fits, mesh)) for factor in self.factors.values() if factor.least)
        key = len(mesh), *(axis_sets_within(mesh, units) for units in self.units), *even, *grids
        if key not in self._tables:
            self._tables[key] = self._table(mesh, grids)
        return self._tables[key]

    def execute(self, options: Sequence[Option], mesh: tuple[int, ...]) -> bool:
        """Whether the runtime can execute one combination of these options, one for each axis."""
        masks = [[sum(1 << axis for axis, chosen in enumerate(options) if chosen == option)] for option in self.options]
        return bool(self._legal(np.array(masks), mesh)[0])

    def _table(self, mesh: tuple[int, ...], grids: Sequence[LayoutGrid]) -> ChoiceTable:
        combos, masks = axis_combinations(len(self.options), len(mesh))
        ok = self._legal(masks, mesh)
        layouts = []
        for position, grid in enumerate(grids):
            states = [(*o.operands, *o.results)[position] for o in self.options]
            numbers = np.array([grid.number.get(s, -1) for s in states])[combos]
            places = np.maximum(numbers, 0) @ grid.radix
            layouts.append(np.where((numbers >= 0).all(1), grid.index[places], -1))
            ok &= layouts[-1] >= 0
        split = {number: masks[number][ok] for number in self.split}
        return ChoiceTable(self.options, combos[ok], tuple([layout[ok] for layout in layouts]), split)

    def _legal(self, masks: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
        """Which combinations the runtime can execute. A factor has no more shards than units, a minor one is split only
        where outer axes leave one unit of its majors, one that has to be even where it is, and options that exclude
        each other do not meet. (That axes of one device split nothing is up to the layouts.)"""
        devices, ok = axis_set_devices(mesh), np.ones(masks.shape[1], bool)
        over = dict.fromkeys(self.factors, np.zeros(masks.shape[1], int))  # axes that split a factor
        for number, option in self.split.items():
            for name in filter(None, (option.name, self.factors[option.name].joint)):
                over[name] = over.get(name, 0) | masks[number]
        for number, option in self.split.items():
            here = masks[number]
            ok &= (here == 0) | (devices[over[option.name]] <= option.count)
            factor = self.factors[option.name]
            if factor.joint or factor.least:
                ok &= here & (here - 1) == 0
            if factor.least:
                able = np.array([factor.fits(n) for n in mesh])
                for axis in np.flatnonzero(~able):
                    ok &= here >> axis & 1 == 0
            for major in self.factors[option.name].after:
                if major not in self.factors:
                    ok &= here == 0
                    continue
                for axis in range(len(mesh)):
                    outer = devices[over[major] & ((1 << axis) - 1)]
                    ok &= (here >> axis & 1 == 0) | (outer >= self.factors[major].size)
        for one, two in self.clashing:
            ok &= (masks[one] == 0) | (masks[two] == 0)
        return ok


def _exclusive(one: Option, two: Option) -> bool:
    """One factor has one tiling; two factors in one dim of a tensor have to nest, and to cut it in the same way; and
    some go without each other."""
    if one.name == two.name:
        return True
    assert one.factor is not None and two.factor is not None
    if one.name in two.factor.without or two.name in one.factor.without:
        return True
    nested = one.name in (*two.factor.after, two.factor.joint) or two.name in (*one.factor.after, one.factor.joint)
    return any(
        a.sharded and b.sharded and a.dim == b.dim and (a.tiling != b.tiling or not nested)
        for a, b in zip((*one.operands, *one.results), (*two.operands, *two.results), strict=True)
    )
