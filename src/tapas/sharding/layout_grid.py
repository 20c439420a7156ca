"""The layouts of a tensor, numbered, and which of them are one step apart. That depends on their states, not on any
sizes: it is worked out once for all tensors, and all meshes, whose states may be split over the same axes.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, permutations
from math import prod

import numpy as np

from tapas.errors import GraphError
from tapas.sharding.layout import R, State
from tapas.sharding.route import LOCAL, conversion

CACHED_GRIDS = 1024
CACHED_GRAPHS = 512  # of steps


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


@dataclass(frozen=True, eq=False)
class StepGroup:
    """Steps with the same collective over as many axes."""

    kind: str
    axes: np.ndarray  # [number, step]: outermost first
    steps: np.ndarray  # those that do it forward, then those that do it backward
    forward: int  # how many of them


@dataclass(frozen=True)
class StepGraph:
    """All single steps between the layouts of a grid."""

    source: np.ndarray  # numbers of layouts
    target: np.ndarray
    groups: tuple[StepGroup, ...]
    layouts: int
    dims: tuple[np.ndarray, np.ndarray]  # that the old and the new state split; that of the other where one splits none

    @cached_property
    def leaving(self) -> np.ndarray:
        """[number, layout]: the steps that start there; where there are no more, one that does not exist."""
        order = np.argsort(self.source, kind="stable")
        source = self.source[order]
        number = np.arange(len(order)) - np.searchsorted(source, source)
        steps = np.full((number.max(initial=0) + 1, self.layouts), len(order))
        steps[number, source] = order
        return steps


@lru_cache(CACHED_GRAPHS)
def steps_between(grid: LayoutGrid, priced: bool) -> StepGraph:
    """All steps between layouts."""
    states = [State(state.kind, state.dim) for state in grid.states]  # tilings make no difference
    numbers, combos = np.flatnonzero(grid.index >= 0), grid.combos
    sources, targets, axes = [], [], []
    dims: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    forward, backward = defaultdict[tuple, list[np.ndarray]](list), defaultdict[tuple, list[np.ndarray]](list)
    count = 0
    for some, s, t in _changes(states, grid.there):
        old, new = states[s], states[t]
        rows = (combos[:, some] == s).all(1) & ~_nested(combos, some, states, {x.dim for x in (old, new) if x.sharded})
        target = grid.index[numbers[rows] + (t - s) * grid.radix[list(some)].sum()]
        source = np.flatnonzero(rows)[target >= 0]
        sources.append(source)
        targets.append(target[target >= 0])
        for mine, state, other in ((dims[0], old, new), (dims[1], new, old)):
            dim = state.dim if state.sharded else other.dim if other.sharded else 0
            mine.append(np.full(len(source), dim))
        steps = np.arange(count, count + len(source))
        count += len(source)
        forward[_collective(old.value, new.value, old == new), len(some)].append(steps)
        if priced:
            backward[_collective(new.gradient, old.gradient, old == new), len(some)].append(steps)
        axes.append(np.full((len(source), len(grid.there)), (*some, *[-1] * (len(grid.there) - len(some)))))
    over = np.concatenate([*axes, np.zeros((0, len(grid.there)), int)]).T
    groups = []
    for kind, many in dict.fromkeys((*forward, *backward)):
        if kind not in LOCAL:
            ahead, back = forward.get((kind, many), []), backward.get((kind, many), [])
            steps = np.concatenate([*ahead, *back])
            groups.append(StepGroup(kind, over[:many, steps], steps, sum(map(len, ahead))))
    source, target = np.concatenate([*sources, numbers[:0]]), np.concatenate([*targets, numbers[:0]])
    both = tuple(np.concatenate([*mine, numbers[:0]]) for mine in dims)
    return StepGraph(source, target, tuple(groups), len(combos), (both[0], both[1]))


def _collective(old: State, new: State, tiled: bool) -> str:
    """Two states that differ in their tilings only, which are not told here, are two all the same."""
    return "all_to_all" if tiled else conversion(old, new)


def _changes(states: list[State], there: tuple[bool, ...]) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Axes, old state and new state (by their numbers): along one axis anything; the same along several at once,
    unless that deals out anew what is split."""
    pairs = list(permutations(range(len(states)), 2))
    yield from (((a,), s, t) for a in range(len(there)) for s, t in pairs)
    axes = [a for a, several in enumerate(there) if several]
    for many in range(2, len(axes) + 1):
        for some in combinations(axes, many):
            yield from ((some, s, t) for s, t in pairs if not (states[s].sharded and states[t].sharded))


def _nested(combos: np.ndarray, axes: tuple[int, ...], states: list[State], dims: set[int]) -> np.ndarray:
    """Layouts where an inner axis splits a dim that a step touches: its pieces would interleave."""
    bad = np.array([state.sharded and state.dim in dims for state in states])
    inner = [b for b in range(axes[0] + 1, combos.shape[1]) if b not in axes]
    return np.asarray(bad[combos[:, inner]].any(axis=1))
