"""What a call may choose from: the combinations of its options over the axes of a mesh that the runtime can execute,
and the layouts that come with them. They are the same on all meshes that deal its units out over the same axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tapas.rules.choices import Option, clash
from tapas.sharding.layout_grid import LayoutGrid, axis_combinations, axis_set_devices, axis_sets_within


@dataclass(frozen=True)
class Choices:
    combos: np.ndarray  # [choice, axis] -> option
    layouts: tuple[np.ndarray, ...]  # of each operand and result: [choice] -> layout number
    masks: dict[int, np.ndarray]  # option that splits a factor -> [choice] -> the axes that do it, a bit for each


class Menu:
    def __init__(self, options: Sequence[Option]) -> None:
        self.options = tuple(options)
        self.split = {number: o for number, o in enumerate(options) if o.factor is not None}
        self.factors = {o.name: o.factor for o in self.split.values() if o.factor is not None}
        pairs = combinations(self.split.items(), 2)
        self.clashing = [(i, j) for (i, one), (j, two) in pairs if _exclude(one, two)]
        after = {major for factor in self.factors.values() for major in factor.after if major in self.factors}
        # all that choices depend on of the sizes of a mesh
        self.units = sorted({o.count for o in self.split.values()} | {self.factors[major].size - 1 for major in after})
        self._known: dict[tuple, Choices] = {}

    def on(self, mesh: tuple[int, ...], grids: Sequence[LayoutGrid]) -> Choices:
        """The choices on a mesh with such layouts of the operands and results."""
        key = len(mesh), *(axis_sets_within(mesh, units) for units in self.units), *grids
        if key not in self._known:
            self._known[key] = self._made(mesh, grids)
        return self._known[key]

    def _made(self, mesh: tuple[int, ...], grids: Sequence[LayoutGrid]) -> Choices:
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
        return Choices(combos[ok], tuple([layout[ok] for layout in layouts]), split)

    def _legal(self, masks: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
        """Which combinations the runtime can execute (see rules/choices.py, `legal`), all at once."""
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


def _exclude(one: Option, two: Option) -> bool:
    """One factor, one tiling; and two factors in one dim have to nest."""
    return one.name == two.name or clash(one, two)
