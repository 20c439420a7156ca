"""Layouts of a tensor on a mesh, and the cheapest moves between them.

A step changes the state along one axis (or the same state along several axes at once, hierarchically:
an all-reduce over nodes and devices scatters within the node first). The cheapest way between two
layouts is a shortest path of steps; all pairs at once are the min-plus closure of the step matrix.

What a step sends follows from the states: its value goes from `value(old)` to `value(new)`, its gradient
from `gradient(new)` back to `gradient(old)`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2, prod

import numpy as np

from tapas.cost.collectives import Lines
from tapas.hardware.cluster import Cluster, Link, Mesh, axis_link
from tapas.ir.graph import ITEMSIZE, Tensor
from tapas.sharding.layout import B, Layout, R, State, extents
from tapas.sharding.layout_grid import Grid, dealt, grid_of
from tapas.sharding.shortest_paths import TIE, Ways
from tapas.sharding.steps import Sent, conversion, steps_between

BUCKET = 25_000_000  # bytes: gradients of weights that need the same reduction are packed to about this size
WHOLE = (R, B)
SENDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def collective_seconds(
    kind: str, nbytes: np.ndarray | float, n: int, link: Link, share: np.ndarray | float = 1.0
) -> np.ndarray | float:
    """Time of a collective over n devices. `nbytes` is the tensor that is whole on this axis, except
    for all_to_all, where it is what one device holds. Tensors that are sent together pay a share of
    the latency each."""
    if kind not in SENDS or n == 1:
        return np.zeros_like(nbytes) if isinstance(nbytes, np.ndarray) else 0.0
    passes = 2 if kind == "all_reduce" else 1
    return passes * ((n - 1) / n * nbytes / link.bytes_per_s + share * ceil(log2(n)) * link.latency_seconds)


@dataclass(frozen=True, slots=True)
class Move:
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


class Space:
    """All layouts of one kind of tensor on a mesh, with the cheapest route between any two."""

    def __init__(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        differentiable: bool,
        states: Sequence[State],
        packed: bool,
        router: "Router",
    ) -> None:
        self.shape, self.itemsize, self.differentiable = shape, itemsize, differentiable
        self.packed = packed  # a weight: its gradient travels together with others
        self.mesh, self.links, self.lines = router.mesh.sizes, router.links, router.lines
        self.states = tuple(states)
        self.grid = self._numbered()
        self.number, self.combos = self.grid.number, self.grid.combos
        self.elements = self._elements()
        self.nbytes = self.elements * float(self.itemsize)

    # -- layouts -------------------------------------------------------------------------------

    def _numbered(self) -> Grid:
        allowed = [dealt(self.mesh, self._units(state)) if state.sharded else 0 for state in self.states]
        return grid_of(self.states, tuple(allowed), tuple(n > 1 for n in self.mesh))

    def _units(self, state: State) -> int:
        """How many can be dealt out: the fewest of any segment."""
        return min(length // unit for length, unit in state.tiling or ((self.shape[state.dim], 1),))

    def _elements(self) -> np.ndarray:
        """What a device holds at most."""
        local: dict[int, np.ndarray] = {}
        for s, mask in self.grid.masks.items():
            state = self.states[s]
            sizes = extents(self.shape[state.dim], state.tiling, self.mesh)[mask]
            # a dim is split by one state at a time
            local[state.dim] = np.where(mask > 0, sizes, local[state.dim]) if state.dim in local else sizes
        whole = prod(size for dim, size in enumerate(self.shape) if dim not in local)
        return prod(local.values(), start=np.full(len(self), whole))

    @cached_property
    def views(self) -> np.ndarray:
        """[i, j]: whether a device that has layout i has j in the same memory, as a part of it or all."""
        whole = np.array([state.value == R for state in self.states])
        split = np.array([state.sharded for state in self.states])
        same = np.eye(len(self.states), dtype=bool) | (whole[:, None] & (whole | split))
        found = np.ones((len(self), len(self)), bool)
        for states in self.combos.T:
            found &= same[states[:, None], states]
        return found

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

    def _conversion_seconds(self, sent: Sent, small: np.ndarray, large: np.ndarray) -> np.ndarray:
        """Seconds of conversions; `small` and `large` are a device's bytes at their split and whole ends."""
        axes = self.lines.of(sent)
        if sent.kind == "all_to_all":
            return axes[0].seconds(large)
        total = np.zeros(len(small))
        if sent.kind == "all_gather":
            held = small
            for axis in axes:  # gather over the slow outer axis while pieces are small
                held = held * axis.size
                total = total + axis.seconds(held)
        elif sent.kind == "all_reduce":
            held = large
            share = np.minimum(held / BUCKET, 1.0) if self.packed else 1.0
            for axis in reversed(axes[1:]):
                once = axis.seconds(held, share)
                total = total + once + once  # scattered, then gathered again
                held = np.ceil(held / self.itemsize / axis.size) * self.itemsize
            total = total + 2 * axes[0].seconds(held, share)
        return total

    @cached_property
    def ways(self) -> Ways:
        known = steps_between(self.grid, self.differentiable)
        source, target = self.nbytes[known.source], self.nbytes[known.target]
        small, large = np.minimum(source, target), np.maximum(source, target)
        ahead, back = np.zeros(len(small)), np.zeros(len(small))
        for sent in known.sent:
            seconds = self._conversion_seconds(sent, small[sent.steps], large[sent.steps])
            ahead[sent.steps[: sent.forward]] = seconds[: sent.forward]
            back[sent.steps[sent.forward :]] = seconds[sent.forward :]
        return Ways(known, ahead, back)

    @property
    def steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of single steps, forward and backward; inf where there is no such step."""
        return self.ways.matrices

    @property
    def seconds(self) -> np.ndarray:
        """[i, j]: the cheapest way from layout i to layout j and back for the gradient."""
        return self.ways.seconds if len(self) > 1 else np.zeros((1, 1))

    @property
    def forward_seconds(self) -> np.ndarray:
        """[i, j]: the part of it that is spent in the forward pass."""
        return self.ways.both[1]

    def between(self, sources: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both for some layouts."""
        if len(self) == 1:
            nothing = np.zeros((len(sources), len(targets)))
            return nothing, nothing
        return self.ways.between(sources, targets)

    def route(self, source: int, target: int) -> list[Move]:
        """The steps of the cheapest way."""
        total, (forward, backward) = self.seconds, self.steps
        moves: list[Move] = []
        while source != target:
            via = forward[source] + backward[source] + TIE + total[:, target]
            via[source] = np.inf
            following = int(np.argmin(via))
            moves.append(self._move(source, following))
            source = following
        return moves

    def _move(self, source: int, target: int) -> Move:
        axes = tuple(int(a) for a in np.flatnonzero(self.combos[source] != self.combos[target]))
        old, new = self.layout(source)[axes[0]], self.layout(target)[axes[0]]
        forward = conversion(old.value, new.value)
        backward = conversion(new.gradient, old.gradient) if self.differentiable else "none"
        small, large = sorted((self.nbytes[source], self.nbytes[target]))
        gathered = {"all_gather", "reduce_scatter"} & {forward, backward}
        whole = small * prod(self.mesh[a] for a in axes) if gathered else large
        steps = self.steps
        return Move(
            axes,
            old,
            new,
            forward,
            backward,
            int(whole),
            float(steps[0][source, target]),
            float(steps[1][source, target]),
        )


class Router:
    """Spaces of one mesh on one cluster, made once for each kind of tensor."""

    def __init__(self, mesh: Mesh, cluster: Cluster) -> None:
        self.mesh, self.cluster = mesh, cluster
        self.links = tuple(axis_link(cluster, mesh, axis) for axis in range(len(mesh.sizes)))
        self.lines = Lines(mesh, self.links)
        self._spaces: dict[tuple, Space] = {}

    def space(
        self, tensor: Tensor, states: Iterable[State], packed: bool = False, besides: Iterable[State] = WHOLE
    ) -> Space:
        """The layouts of a tensor of which these states are of interest; besides, those of a whole one."""
        plain = {state if tensor.differentiable or state != B else R for state in besides}
        key = (tensor.shape, ITEMSIZE[tensor.dtype], tensor.differentiable, tuple(sorted({*states} | plain)), packed)
        if key not in self._spaces:
            self._spaces[key] = Space(*key, self)
        return self._spaces[key]
