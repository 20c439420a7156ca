"""The layouts of a tensor, numbered: the same on all meshes where its states may be split over the same axes."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from tapas.errors import GraphError
from tapas.sharding.layout import R, State

CACHED_GRIDS = 1024


@dataclass(frozen=True, eq=False)
class LayoutGrid:
    states: tuple[State, ...]
    there: tuple[bool, ...]  # the axes of several devices
    number: dict[State, int]
    radix: np.ndarray
    combos: np.ndarray  # [layout, axis] -> state
    index: np.ndarray  # [combination of states] -> layout, or -1
    masks: dict[int, np.ndarray]  # split state -> [layout] -> the axes that have it, a bit for each


@lru_cache(CACHED_GRIDS)
def axis_set_devices(mesh: tuple[int, ...]) -> np.ndarray:
    """The number of devices of each set of axes, a bit for each axis."""
    return np.array([prod(n for a, n in enumerate(mesh) if chosen >> a & 1) for chosen in range(1 << len(mesh))])


@lru_cache(CACHED_GRIDS)
def axis_sets_within(mesh: tuple[int, ...], units: int) -> int:
    """The sets of axes that have no more devices than there are units, a bit for each set. Where there are none, as in
    a dim of size 0, no axis is left: it is whole."""
    return sum(1 << chosen for chosen, n in enumerate(axis_set_devices(mesh).tolist()) if n <= max(units, 1))


@lru_cache(CACHED_GRIDS)
def axis_combinations(states: int, axes: int) -> tuple[np.ndarray, np.ndarray]:
    """[combination, axis] -> state; and [state, combination] -> the axes that have it, a bit for each."""
    grid = np.indices((states,) * axes).reshape(axes, -1).T
    return grid, ((grid == np.arange(states)[:, None, None]) << np.arange(axes)).sum(2)


@lru_cache(CACHED_GRIDS)
def layout_grid(states: tuple[State, ...], allowed: tuple[int, ...], there: tuple[bool, ...]) -> LayoutGrid:
    """For states with the sets of axes that each may be split over, a bit for each set."""
    axes = len(there)
    grid, masked = axis_combinations(len(states), axes)
    masks = {s: masked[s] for s, state in enumerate(states) if state.sharded}
    legal = np.ones(len(grid), bool)
    for s, mask in masks.items():
        fits = np.array([bool(allowed[s] >> chosen & 1) for chosen in range(1 << axes)])
        legal &= fits[mask]
        for other, mask2 in masks.items():
            if other != s and states[other].dim == states[s].dim:
                legal &= (mask == 0) | (mask2 == 0)
    for axis, several in enumerate(there):
        if not several:  # nothing to split, nothing to add up
            legal &= grid[:, axis] == states.index(R)
    combos, index = grid[legal], np.full(len(grid), -1)
    index[legal] = np.arange(len(combos))
    radix = np.array([len(states) ** (axes - 1 - a) for a in range(axes)])
    number = {state: s for s, state in enumerate(states)}
    return LayoutGrid(states, there, number, radix, combos, index, {s: mask[legal] for s, mask in masks.items()})


def tensor_grid(shape: tuple[int, ...], states: tuple[State, ...], mesh: tuple[int, ...]) -> LayoutGrid:
    """The layouts of a tensor on a mesh that are made of these states."""
    allowed = [axis_sets_within(mesh, _units(shape, state)) if state.sharded else 0 for state in states]
    return layout_grid(states, tuple(allowed), tuple(n > 1 for n in mesh))


def _units(shape: tuple[int, ...], state: State) -> int:
    """How many can be given to devices: the fewest of any segment."""
    size = shape[state.dim]
    segments = state.tiling or ((size, 1),)
    if sum(length for length, _ in segments) != size or any(length % unit for length, unit in segments):
        remedy = "this is a defect of the rule that made the layout; please report it"
        raise GraphError(f"{state} of a tensor {list(shape)}", f"does not cover the {size} elements of its dim", remedy)
    return min(length // unit for length, unit in segments)
