"""The choices of an operator: the combinations of its options over the axes of a mesh that the runtime can execute, and
the layouts that come with them. They are the same on all meshes that divide its units over the same axes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tapas.rules.options import Choice, Option, clash
from tapas.sharding.layout_grid import LayoutGrid, axis_combinations, axis_set_devices, axis_sets_within


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
        key = len(mesh), *(axis_sets_within(mesh, units) for units in self.units), *grids
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
        where outer axes leave one unit of its majors, and options that exclude each other do not meet. (That axes of
        one device split nothing is up to the layouts.)"""
        devices, ok = axis_set_devices(mesh), np.ones(masks.shape[1], bool)
        over = dict.fromkeys(self.factors, np.zeros(masks.shape[1], int))  # axes that split a factor
        for number, option in self.split.items():
            over[option.name] = over[option.name] | masks[number]
        for number, option in self.split.items():
            here = masks[number]
            ok &= (here == 0) | (devices[over[option.name]] <= option.count)
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
    """One factor, one tiling; and two factors in one dim have to nest."""
    return one.name == two.name or clash(one, two)
