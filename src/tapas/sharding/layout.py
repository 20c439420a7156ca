"""States along one mesh axis, layouts over all axes, and what a rank holds of a tensor.

A state says what the value *and* the gradient of a tensor look like along one mesh axis:

    S(d)  value split on dim d, gradient split on dim d
    R     value whole,          gradient whole
    B     value whole,          gradient a partial sum   (adjoint of P)
    P     value a partial sum,  gradient whole           (adjoint of B)

A split follows `torch.chunk`, in whole *units*: a head is never cut. A dim may also be a
concatenation of *segments* that are each split by themselves (Q, K and V packed in one matrix).
Both are said by the tiling of an S state: a tuple of (length, unit); () is the plain split.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

Tiling = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, order=True)
class State:
    kind: str  # "S", "R", "B" or "P"
    dim: int = -1
    tiling: Tiling = ()

    @property
    def sharded(self) -> bool:
        return self.kind == "S"

    @property
    def value(self) -> "State":
        """What the value looks like: S, R or P."""
        return R if self.kind == "B" else self

    @property
    def gradient(self) -> "State":
        """What the gradient looks like: S, R or P."""
        return {"S": self, "R": R, "B": P, "P": R}[self.kind]

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim}{'|' + tiling_text(self.tiling) if self.tiling else ''})"


R, B, P = State("R"), State("B"), State("P")

Layout = tuple[State, ...]


def as_values(layout: Layout) -> Layout:
    """What values look like in a layout, whatever their gradients do."""
    return tuple(state.value for state in layout)


def S(dim: int, tiling: Tiling = ()) -> State:
    return State("S", dim, tiling)


def tiling_text(tiling: Tiling) -> str:
    """((1600, 64),) * 3 reads `3x1600/64`; segments of different kinds are joined by `+`."""
    runs: list[list] = []
    for segment in tiling:
        if runs and runs[-1][1] == segment:
            runs[-1][0] += 1
        else:
            runs.append([1, segment])
    return "+".join(
        (f"{count}x" if count > 1 else "") + f"{length}" + (f"/{unit}" if unit > 1 else "")
        for count, (length, unit) in runs
    )


def parse_state(text: str) -> State:
    """The inverse of `str(state)`."""
    if text in ("R", "B", "P"):
        return State(text)
    match = re.fullmatch(r"S\((\d+)(?:\|([\dx/+]+))?\)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a state; write R, B, P or S(dim)")
    return S(int(match[1]), parse_tiling(match[2] or ""))


def parse_tiling(text: str) -> Tiling:
    """The inverse of `tiling_text`."""
    tiling: list[tuple[int, int]] = []
    for run in filter(None, text.split("+")):
        parts = re.fullmatch(r"(?:(\d+)x)?(\d+)(?:/(\d+))?", run)
        if parts is None or int(parts[3] or 1) == 0:
            raise ValueError(f"{text!r} is not a tiling: segments are written like 3x1600/64")
        tiling += [(int(parts[2]), int(parts[3] or 1))] * int(parts[1] or 1)
    return tuple(tiling)


def _chunk(length: int, unit: int, n: int, i: int) -> tuple[int, int]:
    """The i-th of n chunks of a segment, in whole units, as torch.chunk deals them out."""
    each = -(-(length // unit) // n) * unit
    return min(i * each, length), min((i + 1) * each, length)


def pieces(size: int, tiling: Tiling, axes: Sequence[int], coord: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The ranges of a dim that one rank holds, when `axes` (sizes, outermost first) all split it."""
    held, offset = [], 0
    for length, unit in tiling or ((size, 1),):
        start, stop = 0, length
        for n, i in zip(axes, coord, strict=True):
            low, high = _chunk(stop - start, unit, n, i)
            start, stop = start + low, start + high
        held.append((offset + start, offset + stop))
        offset += length
    return tuple(held)


def extent(size: int, tiling: Tiling, axes: Sequence[int]) -> int:
    """The largest number of elements any rank holds of a dim split by `axes`."""
    return sum(stop - start for start, stop in pieces(size, tiling, axes, (0,) * len(axes)))


@lru_cache(4096)
def extents(size: int, tiling: Tiling, mesh: tuple[int, ...]) -> np.ndarray:
    """The same for all sets of axes of a mesh, each a number with a bit for every axis."""
    sets = range(1 << len(mesh))
    return np.array([extent(size, tiling, [n for a, n in enumerate(mesh) if chosen >> a & 1]) for chosen in sets])


def split_of(layout: Layout, dim: int) -> tuple[tuple[int, ...], Tiling]:
    """Which axes split a dim, outermost first, and with which tiling."""
    axes = tuple(a for a, state in enumerate(layout) if state.sharded and state.dim == dim)
    return axes, layout[axes[0]].tiling if axes else ()


def local_pieces(
    shape: Sequence[int], layout: Layout, mesh: Sequence[int], coord: Sequence[int]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For every dim, the ranges that the rank at `coord` holds."""
    held = []
    for dim, size in enumerate(shape):
        axes, tiling = split_of(layout, dim)
        held.append(pieces(size, tiling, [mesh[a] for a in axes], [coord[a] for a in axes]))
    return tuple(held)


def local_shape(
    shape: Sequence[int], layout: Layout, mesh: Sequence[int], coord: Sequence[int] | None = None
) -> tuple[int, ...]:
    """What the rank at `coord` holds; without `coord`, the largest that any rank holds."""
    held = local_pieces(shape, layout, mesh, coord or (0,) * len(mesh))
    return tuple(sum(stop - start for start, stop in ranges) for ranges in held)


def local_elements(shape: Sequence[int], layout: Layout, mesh: Sequence[int]) -> int:
    return prod(local_shape(shape, layout, mesh))
