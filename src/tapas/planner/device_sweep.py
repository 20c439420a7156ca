"""How a model scales: the best mesh for each of several numbers of devices, the same batch on all."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tapas.errors import TapasError
from tapas.hardware.mesh import MOST_DEVICES, factorizations
from tapas.ir.graph import Graph
from tapas.planner.mesh_ranking import RankedMesh, rank_meshes
from tapas.planner.request import Request
from tapas.util import Progress, paused, silent

_REMEDY = "write e.g. --sweep devices=8,16,64 or --sweep devices=8,16,...,4096"


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """The best mesh of a number of devices, compared with the fewest devices that have a plan."""

    best: RankedMesh
    meshes: int  # that were tried
    speedup: float | None
    efficiency: float | None  # of the speed-up that as many more devices could give

    @property
    def devices(self) -> int:
        return self.best.mesh.devices

    def to_dict(self) -> dict[str, Any]:
        return {
            "devices": self.devices, "meshes": self.meshes, **self.best.to_dict(), "speedup": self.speedup,
            "efficiency": self.efficiency,
        }  # fmt: skip


@paused
def sweep(
    graph: Graph,
    request: Request,
    counts: Sequence[int],
    hints: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> list[ScalingPoint]:
    """The best mesh for each number of devices; the mesh of the request does not matter."""
    return scaling_points([rank_meshes(graph, factorizations(n), request, hints, progress) for n in counts])


def scaling_points(rankings: Sequence[Sequence[RankedMesh]]) -> list[ScalingPoint]:
    first = next((rows[0] for rows in rankings if rows[0].cost is not None), None)
    found = []
    for rows in rankings:
        speedup = efficiency = None
        if first is not None and first.cost is not None and rows[0].cost:
            speedup = first.cost / rows[0].cost
            efficiency = speedup * first.mesh.devices / rows[0].mesh.devices
        found.append(ScalingPoint(rows[0], len(rows), speedup, efficiency))
    return found


def parse_sweep(text: str) -> list[int]:
    """From `devices=8,16,64`, or `devices=8,16,...,4096`: dots go on as the two numbers before them do."""
    place = f"--sweep {text}"
    name, sign, listed = text.partition("=")
    if not sign or name.strip() != "devices":
        raise TapasError(place, "is not devices=N,N,...", _REMEDY)
    found: list[int] = []
    dots = False
    for part in (part.strip() for part in listed.split(",")):
        if part in ("...", "…"):
            if len(found) < 2 or dots:
                raise TapasError(place, "dots go on from two numbers", _REMEDY)
            dots = True
            continue
        if not re.fullmatch("[0-9]{1,9}", part) or not 1 <= int(part) <= MOST_DEVICES:
            raise TapasError(place, f"{part!r} is not a number of devices", _REMEDY)
        found += _between(found, int(part), place) if dots else []
        found.append(int(part))
        dots = False
    if dots or len(set(found)) < len(found) or found != sorted(found):
        raise TapasError(place, "numbers of devices have to increase, and dots to end", _REMEDY)
    return found


def _between(before: Sequence[int], last: int, place: str) -> list[int]:
    one, two = before[-2:]
    if two <= one or two % one:
        raise TapasError(
            place, f"it is not clear how {one}, {two} goes on", "let the second be a multiple of the first"
        )
    found = []
    while (following := (found or [two])[-1] * (two // one)) < last:
        found.append(following)
    if following != last:
        raise TapasError(place, f"{one}, {two}, ... does not come to {last}", f"end it with {following}")
    return found
