"""What a call may choose from: the combinations of its options over the axes of a mesh that the runtime can execute,
and the layouts that come with them. They are the same on all meshes that deal its units out over the same axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from tapas.grids import Grid, dealt
from tapas.rules.choices import Option, clash


@dataclass(frozen=True)
class Choices:
    combos: np.ndarray  # [choice, axis] -> option
    layouts: tuple[np.ndarray, ...]  # of each operand and result: [choice] -> layout number
    masks: dict[int, np.ndarray]  # option that splits a factor -> [choice] -> the axes that do it, a bit for each


class Menu:
    def __init__(self, options: Sequence[Option]) -> None:
        self.options = tuple(options)
        split = {o.name: o.factor for o in options if o.factor is not None}
        after = {major for factor in split.values() for major in factor.after if major in split}
        # all that choices depend on of the sizes of a mesh: see `_legal`
        self.units = sorted({o.count for o in options if o.factor} | {split[major].size - 1 for major in after})
        self._known: dict[tuple, Choices] = {}

    def on(self, mesh: tuple[int, ...], grids: Sequence[Grid]) -> Choices:
        """The choices on a mesh with such layouts of the operands and results."""
        key = len(mesh), *(dealt(mesh, units) for units in self.units), *grids
        if key not in self._known:
            self._known[key] = self._made(mesh, grids)
        return self._known[key]

    def _made(self, mesh: tuple[int, ...], grids: Sequence[Grid]) -> Choices:
        combos = _grid(len(self.options), len(mesh))
        ok = _legal(self.options, combos, mesh)
        layouts = []
        for position, grid in enumerate(grids):
            states = [(*o.operands, *o.results)[position] for o in self.options]
            numbers = np.array([grid.number.get(s, -1) for s in states])[combos]
            layout = np.where((numbers >= 0).all(1), grid.index[(numbers.clip(0) * grid.radix).sum(1)], -1)
            ok &= layout >= 0
            layouts.append(layout)
        combos, bits = combos[ok], np.arange(len(mesh))
        split = [number for number, option in enumerate(self.options) if option.factor is not None]
        masks = {number: ((combos == number) << bits).sum(1) for number in split}
        return Choices(combos, tuple(layout[ok] for layout in layouts), masks)


@lru_cache(1024)
def _grid(options: int, axes: int) -> np.ndarray:
    return np.indices((options,) * axes).reshape(axes, -1).T


def _legal(options: Sequence[Option], combos: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """Which combinations the runtime can execute (see rules/choices.py, `legal`), all at once."""
    ok = np.ones(len(combos), bool)
    names = {o.factor.name: o.factor for o in options if o.factor is not None}
    uses = {name: np.array([o.name == name and o.factor is not None for o in options])[combos] for name in names}
    for number, option in enumerate(options):
        if option.factor is None:
            continue
        here = combos == number
        split = np.prod(np.where(uses[option.name], mesh, 1), axis=1)
        ok &= ~here.any(1) | (split <= option.count)
        twins = [i for i, o in enumerate(options) if i != number and o.name == option.name and o.factor is not None]
        if twins:  # one factor, one tiling
            ok &= ~(here.any(1) & np.isin(combos, twins).any(1))
        for major in option.factor.after:
            if major not in names:
                ok &= ~here.any(1)
                continue
            for axis in range(combos.shape[1]):
                outer = np.prod(np.where(uses[major][:, :axis], mesh[:axis], 1), axis=1)
                ok &= ~here[:, axis] | (outer >= names[major].size)
    if len(options) > 1 and combos.shape[1] > 1:
        fits = np.array([[not (a.factor and b.factor and clash(a, b)) for b in options] for a in options])
        for one, two in combinations(range(combos.shape[1]), 2):
            ok &= fits[combos[:, one], combos[:, two]]
    return ok
