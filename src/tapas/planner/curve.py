"""The trade-off between step time and memory as plain data: plans, which of them are knees, and their files."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapas.errors import PlanError
from tapas.plan.plan import Plan

DECIMALS = 9  # of file names, at most: those of bytes in GB


@dataclass(frozen=True)
class Point:
    plan: Plan
    stored: float  # the part of all weights that each device stores
    knee: bool  # a vertex of the lower convex hull: no mixture of two other points is below it

    @property
    def nbytes(self) -> int:
        return sum(self.plan.memory.values())

    @property
    def seconds(self) -> float:
        return self.plan.cost

    @property
    def gap(self) -> float:
        """Relative: how much faster a plan of this memory might be, at most."""
        return self.plan.gap / self.plan.cost if self.plan.cost else 0.0

    def recomputed(self, mode: str) -> int:
        return sum(b.copies for b in self.plan.blocks if b.paths and b.recompute == mode)

    @property
    def blocks(self) -> int:
        return sum(b.copies for b in self.plan.blocks if b.paths)


@dataclass(frozen=True)
class Curve:
    points: tuple[Point, ...]  # from the most frugal to the fastest
    usable: float  # bytes of a device that a plan may use

    def slower(self, point: Point) -> float:
        """Than the fastest, relative."""
        fastest = self.points[-1].seconds
        return point.seconds / fastest - 1 if fastest else 0.0

    def fits(self, point: Point) -> bool:
        return point.nbytes <= self.usable

    @property
    def fitting(self) -> Point | None:
        """The fastest that fits."""
        return next((point for point in reversed(self.points) if self.fits(point)), None)

    @property
    def files(self) -> dict[str, Point]:
        """The plans at the knees, and the fastest that fits, by the names of their files, which sort by memory."""
        kept = [point for point in self.points if point.knee or point is self.fitting]
        return dict(zip(file_names([point.nbytes for point in kept]), kept, strict=True))

    def save(self, folder: Path) -> None:
        check_folder(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlanError(str(folder), f"cannot be made: {error.strerror}", "write elsewhere") from None
        for name, point in self.files.items():
            point.plan.save(folder / name)

    def to_dict(self) -> dict[str, Any]:
        first = self.points[0].plan
        names = {id(point): name for name, point in self.files.items()}
        points = [self._point(point, names.get(id(point))) for point in self.points]
        return {
            "model": first.model, "mesh": first.mesh, "cluster": first.cluster, "training": first.training,
            "inputs": first.inputs, "pins": list(first.pins), "usable_bytes": self.usable, "points": points,
        }  # fmt: skip

    def _point(self, point: Point, file: str | None) -> dict[str, Any]:
        return {
            "memory": point.nbytes, "seconds": point.seconds, "slower": self.slower(point),
            "bound": point.plan.bound, "gap": point.gap, "limit": point.plan.limit or None, "knee": point.knee,
            "fits": self.fits(point), "file": file, "kinds": point.plan.memory, "stored": point.stored,
            "recompute": {
                "blocks": point.blocks, "block": point.recomputed("block"), "selective": point.recomputed("selective"),
            },
        }  # fmt: skip


def drawn(plans: Sequence[tuple[Plan, float]], usable: float) -> Curve:
    """From plans that are sorted by memory, and the part of the weights that a device stores."""
    corners = set(knees([(sum(plan.memory.values()), plan.cost) for plan, _ in plans]))
    return Curve(tuple(Point(*pair, number in corners) for number, pair in enumerate(plans)), usable)


def knees(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which of these points, sorted by their first number, are the vertices of their lower convex hull."""
    hull: list[int] = []
    for number, (x, y) in enumerate(points):
        while len(hull) > 1:
            (x0, y0), (x1, y1) = points[hull[-2]], points[hull[-1]]
            if (x1 - x0) * (y - y0) > (y1 - y0) * (x - x0):
                break
            hull.pop()
        hull.append(number)
    return hull


def file_names(sizes: Sequence[int]) -> list[str]:
    """`plan-040GB.json`: as many decimals as tell them apart."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if max(sizes) >= u), (1.0, "B"))
    digits = max(3, len(str(int(max(sizes) / unit))))
    for decimals in range(DECIMALS + 1):
        width = digits + (decimals + 1 if decimals else 0)
        names = [f"plan-{size / unit:0{width}.{decimals}f}{name}.json" for size in sizes]
        if len({*names}) == len(names):
            return names
    raise AssertionError("two plans of the same size")  # one of them would have been dropped


def check_folder(folder: Path) -> None:
    """Refuse a folder that has something in it, or cannot be made, before any work is done for it."""
    if folder.is_dir():
        if any(folder.iterdir()):
            raise PlanError(str(folder), "is not empty", "give a new folder, or an empty one")
        base = folder
    elif folder.exists():
        raise PlanError(str(folder), "is a file", "give a folder for the plans")
    else:
        base = next(parent for parent in folder.absolute().parents if parent.exists())
    if not base.is_dir() or not os.access(base, os.W_OK):
        raise PlanError(str(folder), f"{base} cannot be written to", "write elsewhere")
