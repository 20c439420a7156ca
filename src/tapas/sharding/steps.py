"""Which layouts are one step apart, and what such a step sends: that depends on their states, not on any sizes.

So it is worked out once for all tensors, and all meshes, with the same grid of layouts.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, permutations

import numpy as np

from tapas.sharding.layout import State
from tapas.sharding.layout_grid import LayoutGrid

CACHED_GRAPHS = 512  # so many are remembered
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LOCAL = ("none", "pad", "slice")  # nothing is sent


def conversion(old: State, new: State) -> str:
    """What happens on the wire (or locally) when a plain state S, R or P becomes another."""
    if old == new:
        return "none"
    match old.kind, new.kind:
        case "S", "S":
            return "all_to_all"
        case "S", "R":
            return "all_gather"
        case "S", "P":
            return "pad"
        case "R", "S":
            return "slice"
        case "P", "S":
            return "reduce_scatter"
        case "P", "R":
            return "all_reduce"
        case _:
            return "none"  # R -> P: one rank keeps the value


@dataclass(frozen=True, eq=False)
class StepGroup:
    """Steps with the same collective over as many axes, or with one that takes the same time."""

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

    @cached_property
    def leaving(self) -> np.ndarray:
        """[number, layout]: the steps that start there; where there are no more, one that does not exist."""
        order = np.argsort(self.source, kind="stable")
        source = self.source[order]
        number = np.arange(len(order)) - np.searchsorted(source, source)
        found = np.full((number.max(initial=0) + 1, self.layouts), len(order))
        found[number, source] = order
        return found


@lru_cache(CACHED_GRAPHS)
def steps_between(grid: LayoutGrid, differentiable: bool) -> StepGraph:
    """All steps between layouts."""
    states = [State(state.kind, state.dim) for state in grid.states]  # tilings make no difference
    numbers, combos = np.flatnonzero(grid.index >= 0), grid.combos
    sources, targets, axes = [], [], []
    forward, backward = defaultdict[tuple, list[np.ndarray]](list), defaultdict[tuple, list[np.ndarray]](list)
    count = 0
    for some, s, t in _changes(states, grid.there):
        old, new = states[s], states[t]
        rows = (combos[:, some] == s).all(1) & ~_nested(combos, some, states, {x.dim for x in (old, new) if x.sharded})
        target = grid.index[numbers[rows] + (t - s) * grid.radix[list(some)].sum()]
        source = np.flatnonzero(rows)[target >= 0]
        sources.append(source)
        targets.append(target[target >= 0])
        steps = np.arange(count, count + len(source))
        count += len(source)
        forward[_priced_as(old.value, new.value, old == new), len(some)].append(steps)
        if differentiable:
            backward[_priced_as(new.gradient, old.gradient, old == new), len(some)].append(steps)
        axes.append(np.full((len(source), len(grid.there)), (*some, *[-1] * (len(grid.there) - len(some)))))
    over = np.concatenate([*axes, np.zeros((0, len(grid.there)), int)]).T
    groups = []
    for kind, many in dict.fromkeys((*forward, *backward)):
        if kind not in LOCAL:
            ahead, back = forward.get((kind, many), []), backward.get((kind, many), [])
            steps = np.concatenate([*ahead, *back])
            groups.append(StepGroup(kind, over[:many, steps], steps, sum(map(len, ahead))))
    source, target = np.concatenate([*sources, numbers[:0]]), np.concatenate([*targets, numbers[:0]])
    return StepGraph(source, target, tuple(groups), len(combos))


def _priced_as(old: State, new: State, tiled: bool) -> str:
    """The collective, or one that takes the same time. Two states that differ in their tilings only, which are not
    told here, are two all the same."""
    kind = "all_to_all" if tiled else conversion(old, new)
    return "all_gather" if kind == "reduce_scatter" else kind


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
