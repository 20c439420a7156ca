"""Layouts of a tensor on a mesh, and the cheapest moves between them.

A step changes the state along one axis (or the same state along several axes at once, hierarchically:
an all-reduce over nodes and devices scatters within the node first). The cheapest path between two
layouts is a shortest path of steps; all pairs at once are the min-plus closure of the step matrix.

What a step sends follows from the states: its value goes from `value(old)` to `value(new)`, its gradient
from `gradient(new)` back to `gradient(old)`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol

import numpy as np

from tapas.hardware.mesh import Mesh
from tapas.ir.graph import ITEMSIZE, Tensor
from tapas.sharding.layout import B, Layout, R, State, extents
from tapas.sharding.layout_grid import StepGraph, StepGroup, steps_between, tensor_grid
from tapas.sharding.route import Hop, step_nbytes
from tapas.sharding.shortest_paths import TIE, ShortestPaths

WHOLE = (R, B)


class StepPrices(Protocol):
    """What single steps cost: links are none of this package's business."""

    def step_seconds(
        self, steps: StepGroup, split_nbytes: np.ndarray, whole_nbytes: np.ndarray, itemsize: int, copies: np.ndarray,
        share: float,
    ) -> np.ndarray | float:  # fmt: skip
        """Seconds of the collective of each step, with the copies that it makes; a device's bytes at the end where it
        holds less and where it holds more. `share`: of a message that a tensor is sent in together with others, as
        weights and their gradients are; 0 if it is sent by itself."""
        ...


@dataclass(frozen=True, slots=True)
class RouteStep:
    """One step of a route: what is sent forward and backward, over which axes, how much, how long."""

    axes: tuple[int, ...]
    old: State
    new: State
    forward: str
    backward: str
    nbytes: int  # of the tensor that is whole on these axes (all_to_all: of what a device holds)
    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def hop(self) -> Hop:
        """What it does, whatever it costs."""
        return Hop(self.axes, self.old, self.new)


class LayoutSpace:
    """All layouts of one kind of tensor on a mesh, with the cheapest route between any two."""

    def __init__(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        priced: bool,
        states: Sequence[State],
        packed: float,
        mesh: tuple[int, ...],
        prices: StepPrices,
    ) -> None:
        self.shape, self.itemsize = shape, itemsize
        self.priced = priced  # whether its gradient is counted
        self.packed = packed  # a weight: its share of the message in which those of its block travel; 0: no weight
        self.mesh, self.prices = mesh, prices
        self.states = tuple(states)
        self.grid = tensor_grid(shape, self.states, mesh)
        self.number, self.combos = self.grid.number, self.grid.combos
        self.elements, self.leading = self._elements()
        self.nbytes = self.elements * float(self.itemsize)

    # -- layouts -------------------------------------------------------------------------------

    def _elements(self) -> tuple[np.ndarray, np.ndarray]:
        """What a device holds at most; and [layout, dim]: how many rows the dims before one make."""
        local: dict[int, np.ndarray] = {}
        for s, mask in self.grid.masks.items():
            state = self.states[s]
            sizes = extents(self.shape[state.dim], state.tiling, self.mesh)[mask]
            # a dim is split by one state at a time
            local[state.dim] = np.where(mask > 0, sizes, local[state.dim]) if state.dim in local else sizes
        held = [np.ones(len(self), int), *(local.get(d, np.full(len(self), n)) for d, n in enumerate(self.shape))]
        made = np.cumprod(np.stack(held, axis=1), axis=1)
        return made[:, -1], made

    @cached_property
    def views(self) -> np.ndarray:
        """[i, j]: whether a device that has layout i has j in the same memory, as a part of it or all."""
        whole = np.array([state.value == R for state in self.states])
        split = np.array([state.sharded for state in self.states])
        same = np.eye(len(self.states), dtype=bool) | (whole[:, None] & (whole | split))
        shared = np.ones((len(self), len(self)), bool)
        for states in self.combos.T:
            shared &= same[states[:, None], states]
        return shared

    def __len__(self) -> int:
        return len(self.combos)

    def layout(self, index: int) -> Layout:
        return tuple(self.states[s] for s in self.combos[index])

    def find(self, layout: Layout) -> int:
        """The index of a layout, -1 if it is not one of this tensor's."""
        if any(state not in self.number for state in layout):
            return -1
        return int(self.grid.index[int(np.dot(self.grid.radix, [self.number[s] for s in layout]))])

    # -- steps ---------------------------------------------------------------------------------

    @cached_property
    def paths(self) -> ShortestPaths:
        graph = steps_between(self.grid, self.priced)
        source, target = self.nbytes[graph.source], self.nbytes[graph.target]
        split, whole = np.minimum(source, target), np.maximum(source, target)
        forward, backward = np.zeros(len(split)), np.zeros(len(split))
        for group in graph.groups:
            nbytes, copies = (split[group.steps], whole[group.steps]), self._copies(group, graph)
            seconds = np.asarray(self.prices.step_seconds(group, *nbytes, self.itemsize, copies, self.packed))
            forward[group.steps[: group.forward]] = seconds[: group.forward]
            backward[group.steps[group.forward :]] = seconds[group.forward :]
        return ShortestPaths(graph, forward, backward)

    def _copies(self, group: StepGroup, graph: StepGraph) -> np.ndarray:
        """How often each step copies its tensor. Parts of the first dim lie one after the other as they are sent; those
        of others are put there, or fetched from there. Sums take a copy, and so does what goes over one axis after
        the other; weights go over all at once."""
        if group.kind == "all_reduce":
            return np.ones(len(group.steps))
        old, new = (dims[group.steps] for dims in graph.dims)
        source, target = graph.source[group.steps], graph.target[group.steps]
        if group.kind == "all_to_all":
            turned = 1.0 * (self.leading[source, new] > 1) + (self.leading[target, old] > 1)
            return np.where(old == new, 2.0, turned)
        several = len(group.axes) > 1 and not self.packed
        return np.where((self.leading[source, old] > 1) | several, 1.0, 0.0)

    @property
    def steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of single steps, forward and backward; inf where there is no such step."""
        return self.paths.matrices

    @property
    def seconds(self) -> np.ndarray:
        """[i, j]: the cheapest path from layout i to layout j and back for the gradient."""
        return self.paths.seconds if len(self) > 1 else np.zeros((1, 1))

    @property
    def forward_seconds(self) -> np.ndarray:
        """[i, j]: the part of it that is spent in the forward pass."""
        return self.paths.both[1]

    def between(self, sources: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both for some layouts."""
        if len(self) == 1:
            nothing = np.zeros((len(sources), len(targets)))
            return nothing, nothing
        return self.paths.between(sources, targets)

    def exchanged(self, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Which ways between some layouts lead from one split to another along an axis: an all-to-all."""
        split = np.array([state.sharded for state in self.states])
        other = split[:, None] & split & ~np.eye(len(split), dtype=bool)
        axes = range(len(self.mesh))
        return np.logical_or.reduce([other[self.combos[sources, a][:, None], self.combos[targets, a]] for a in axes])

    def route(self, source: int, target: int) -> list[RouteStep]:
        """The steps of the cheapest path."""
        total, (forward, backward) = self.seconds, self.steps
        moves: list[RouteStep] = []
        while source != target:
            via = forward[source] + backward[source] + TIE + total[:, target]
            via[source] = np.inf
            following = int(np.argmin(via))
            moves.append(self.step(source, following))
            source = following
        return moves

    def step(self, source: int, target: int) -> RouteStep:
        """A single one, which has to be there."""
        axes = tuple(int(a) for a in np.flatnonzero(self.combos[source] != self.combos[target]))
        hop = Hop(axes, self.layout(source)[axes[0]], self.layout(target)[axes[0]])
        forward, backward = hop.forward, hop.backward if self.priced else "none"
        devices = prod(self.mesh[a] for a in axes)
        nbytes = step_nbytes({forward, backward}, self.nbytes[source], self.nbytes[target], devices)
        ahead, back = (float(seconds[source, target]) for seconds in self.steps)
        return RouteStep(axes, hop.old, hop.new, forward, backward, nbytes, ahead, back)


class Router:
    """Spaces of one mesh, made once for each kind of tensor."""

    def __init__(self, mesh: Mesh, prices: StepPrices) -> None:
        self.mesh, self.prices = mesh, prices
        self._spaces: dict[tuple, LayoutSpace] = {}

    def space(
        self, tensor: Tensor, states: Iterable[State], packed: float = 0.0, besides: Iterable[State] = WHOLE
    ) -> LayoutSpace:
        """The layouts of a tensor of which these states are of interest; besides, those of a whole one."""
        plain = {state if tensor.differentiable or state != B else R for state in besides}
        key = (tensor.shape, ITEMSIZE[tensor.dtype], tensor.priced, tuple(sorted({*states} | plain)), packed)
        if key not in self._spaces:
            self._spaces[key] = LayoutSpace(*key, self.mesh.sizes, self.prices)
        return self._spaces[key]
