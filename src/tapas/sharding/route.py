"""Routes: the steps that take a tensor from one layout to another, as data.

A route is written down where it is decided, and executed as it is: which one is cheapest depends on prices, what it
does and what it sends does not.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from tapas.sharding.layout import Layout, State, parse_state, split_of

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


@dataclass(frozen=True, slots=True)
class Hop:
    """One step: along these axes, one state becomes another.

    >>> print(Hop((0, 1), State("S", 0), State("R")))
    0,1: S(0) -> R
    """

    axes: tuple[int, ...]
    old: State
    new: State

    @property
    def forward(self) -> str:
        """What the value goes through: a collective, or something local."""
        return conversion(self.old.value, self.new.value)

    @property
    def backward(self) -> str:
        """What the gradient goes through on its way back."""
        return conversion(self.new.gradient, self.old.gradient)

    def after(self, layout: Layout) -> Layout:
        return tuple(self.new if axis in self.axes else state for axis, state in enumerate(layout))

    def __str__(self) -> str:
        return f"{','.join(map(str, self.axes))}: {self.old} -> {self.new}"


Route = tuple[Hop, ...]


def parse_hop(text: str) -> Hop:
    """The inverse of `str(hop)`."""
    match = re.fullmatch(r"(\d+(?:,\d+)*): (\S+) -> (\S+)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a step of a route; write e.g. '0: S(0) -> R'")
    return Hop(tuple(map(int, match[1].split(","))), parse_state(match[2]), parse_state(match[3]))


def walked(start: Layout, route: Sequence[Hop]) -> Iterator[tuple[Layout, Hop]]:
    """Each step of a route with the layout before it."""
    layout = start
    for hop in route:
        yield layout, hop
        layout = hop.after(layout)


def step_nbytes(collectives: set[str], before: float, after: float, devices: int) -> int:
    """Bytes of the tensor that is whole on the axes of a step, which have so many devices, from what one of these holds
    before and after; of an all-to-all, of what it holds."""
    gathered = {"all_gather", "reduce_scatter"} & collectives
    return int(min(before, after) * devices if gathered else max(before, after))


def check_layout(shape: Sequence[int], layout: Layout, mesh: Sequence[int]) -> str:
    """Why a tensor cannot have a layout on a mesh; "" if it can."""
    for n, state in zip(mesh, layout, strict=True):
        if n == 1 and state.kind != "R":
            return "an axis of one device splits nothing"
        if state.sharded and state.dim >= len(shape):
            return f"there is no dim {state.dim}"
    for dim, size in enumerate(shape):
        axes, tiling = split_of(layout, dim)
        if not axes:
            continue
        if any(layout[axis].tiling != tiling for axis in axes):
            return f"dim {dim} is split in two ways"
        if tiling and sum(length for length, _ in tiling) != size:
            return f"dim {dim} has {size} elements"
        units = min(length // unit for length, unit in tiling or ((size, 1),))
        devices = prod(mesh[axis] for axis in axes)
        if units < devices:
            return f"dim {dim} has {units} parts to deal out over {devices} devices"
    return ""


def check_route(shape: Sequence[int], start: Layout, route: Sequence[Hop], end: Layout, mesh: Sequence[int]) -> str:
    """Why a route cannot be walked, or leads elsewhere; "" if all is well."""
    layout = start
    for hop in route:
        if not hop.axes or any(axis >= len(mesh) or layout[axis] != hop.old for axis in hop.axes):
            return f"the step {hop} does not start from {', '.join(map(str, layout))}"
        layout = hop.after(layout)
        if wrong := check_layout(shape, layout, mesh):
            return f"the step {hop}: {wrong}"
    return "" if layout == end else f"its route ends in {', '.join(map(str, layout))}"
