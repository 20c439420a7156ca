"""Meshes: the devices of a cluster numbered row-major, so that the innermost axis is contiguous.

Which link an axis crosses follows from the sizes alone (`axis_link`): the order of axes is their placement. Several
axes in place of one also split what one cannot: 8 devices as 4x2 share 4 heads along one axis and something else along
the other.
"""

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

from tapas.errors import ClusterError, TapasError
from tapas.hardware.cluster import ANY, Cluster, Link

DEFAULT_NAMES = ("x", "y", "z")
MESH_REMEDY = "write the axis sizes outermost first, such as 8, 2x4 or dp=2,tp=4"
MOST_AXES = 3  # of a mesh
MOST_DEVICES = 1_000_000


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axis sizes and names, outermost (slowest link) first."""

    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", DEFAULT_NAMES[: len(self.sizes)])
        _check_axes(self.sizes, self.names)

    @property
    def devices(self) -> int:
        return prod(self.sizes)

    def __str__(self) -> str:
        if self.names == DEFAULT_NAMES[: len(self.sizes)]:
            return "x".join(map(str, self.sizes))
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


MeshLike = str | int | Sequence[int] | Mapping[str, int] | Mesh


def parse_mesh(mesh: MeshLike) -> Mesh:
    """A mesh from "8", "2x4", "dp=2,tp=4", (2, 4), {"dp": 2, "tp": 4} or a Mesh."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, str):
        return _parse_mesh_text(mesh)
    place = f"mesh {mesh!r}"
    if isinstance(mesh, Mapping):
        return Mesh(_integers(mesh.values(), place), tuple(map(str, mesh)))
    return Mesh(_integers(mesh if isinstance(mesh, Iterable) else (mesh,), place))


def _parse_mesh_text(text: str) -> Mesh:
    place = f"mesh {text!r}"
    if "=" not in text:
        return Mesh(tuple(_axis_size(part, place) for part in text.split("x")))
    names: list[str] = []
    sizes: list[int] = []
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals:
            lacks = "size" if part.strip().isidentifier() else "name"
            raise ClusterError(place, f"{part.strip()!r} has no {lacks}", "write every axis like dp=2,tp=4")
        names.append(name.strip())
        sizes.append(_axis_size(size, place))
    return Mesh(tuple(sizes), tuple(names))


def _axis_size(text: str, place: str) -> int:
    # int() alone would also take "1_0" and digits of other scripts.
    if not re.fullmatch(r"\s*-?[0-9]+\s*", text):
        raise ClusterError(place, f"{text.strip()!r} is not an axis size", MESH_REMEDY)
    return int(text)


def _integers(values: Iterable[Any], place: str) -> tuple[int, ...]:
    sizes: list[int] = []
    for value in values:
        try:
            sizes.append(operator.index(value))
        except TypeError:
            raise ClusterError(place, f"{value!r} is not an axis size", MESH_REMEDY) from None
    return tuple(sizes)


def _check_axes(sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    place = f"mesh {'x'.join(map(str, sizes))}"
    if not 1 <= len(sizes) <= 3:
        raise ClusterError(place, f"it has {len(sizes)} axes", "a mesh has 1 to 3 axes; merge some")
    for size in sizes:
        if size < 1:
            raise ClusterError(place, f"an axis of size {size}", "sizes are 1 or more")
    if len(names) != len(sizes):
        raise ClusterError(place, f"{len(sizes)} sizes but {len(names)} names ({', '.join(names)})", MESH_REMEDY)
    for name in names:
        if not name.isidentifier():
            raise ClusterError(
                place, f"{name!r} is not a name for an axis", "use letters and digits, such as dp=2,tp=4"
            )
    if len(set(names)) < len(names):
        raise ClusterError(place, f"axis names repeat: {', '.join(names)}", "give every axis a name of its own")


def check_mesh(mesh: Mesh, cluster: Cluster, devices: int | None = None) -> None:
    """Refuse a mesh that does not have exactly the devices there are. How it lies over the nodes is
    not checked: `axis_link` charges an axis that straddles nodes unevenly for what it crosses."""
    if devices is not None and mesh.devices != devices:
        raise ClusterError(
            f"mesh {mesh}",
            f"it takes {mesh.devices} devices, but there are {devices} ({cluster.device.name})",
            f"choose axis sizes whose product is {devices}",
        )


def axis_link(cluster: Cluster, mesh: Mesh, axis: int) -> Link:
    """The link that a collective along one axis runs at, all groups of the axis at the same time.

    Members of a group are `stride` ranks apart and all its ranks lie within `span`. A group that has k
    members in every node it touches sends out of the node over k network cards at once; and so out of a rack.
    """
    stride = prod(mesh.sizes[axis + 1 :])
    span = stride * mesh.sizes[axis]
    inside = mesh.sizes[axis] if mesh.devices <= cluster.per_node else gcd(span, cluster.per_node) // stride
    link = _within_a_node(cluster, inside)
    for devices, out in cluster.levels:
        if mesh.devices <= devices or devices % span == 0 or mesh.sizes[axis] == 1:
            return link
        if devices % stride:  # no two members in it, or not as many in each: count on one
            link = out
        else:
            # Where span and what a node holds do not divide each other, groups are cut at multiples of their gcd.
            members = gcd(span, devices) // stride
            slower = link if link.bytes_per_s < members * out.bytes_per_s else out
            bytes_per_s = min(link.bytes_per_s, members * out.bytes_per_s)
            link = replace(out, bytes_per_s=bytes_per_s, times=slower.times)
    return link


def _within_a_node(cluster: Cluster, members: int) -> Link:
    """Of so many of its devices: without a switch they use the links between each other, and no others. That is what
    makes them slower than all devices together are, and counted once."""
    link = cluster.intra
    if cluster.switched or not 1 < members < cluster.per_node:
        return link
    share = (members - 1) / (cluster.per_node - 1)
    return replace(link, bytes_per_s=link.bytes_per_s * share, times=((ANY, link.curves(cluster.per_node)),))


def uneven_axes(mesh: Mesh, cluster: Cluster) -> list[str]:
    """A sentence for the innermost axis whose groups do not line up with the nodes, if there is one."""
    span = 1
    for name, size in reversed(list(zip(mesh.names, mesh.sizes, strict=True))):
        span *= size
        aligned = span % cluster.per_node == 0 or cluster.per_node % span == 0
        if not aligned and mesh.devices > cluster.per_node:
            where = f"{span / cluster.per_node:.3g} nodes of {cluster.per_node}"
            return [f"{span} devices along {name} take {where}: some groups reach into the next node, which is slow"]
    return []


def factorizations(devices: int, axes: int = MOST_AXES) -> list[Mesh]:
    """Every mesh of so many devices, axes of one device left out; those of few axes first."""
    if devices == 1:
        return [Mesh((1,))]
    return [Mesh(sizes) for many in range(1, axes + 1) for sizes in _products(devices, many)]


def _products(number: int, many: int) -> list[tuple[int, ...]]:
    """All ways to write a number as a product of so many factors above 1, order counts."""
    if many == 1:
        return [(number,)] if number > 1 else []
    divisors = (d for d in range(2, number // 2 + 1) if number % d == 0)
    return [(first, *rest) for first in divisors for rest in _products(number // first, many - 1)]


def counted(
    cluster: Cluster, devices: int | None, nodes: int | None, per_node: int | None, mesh: Mesh | None = None
) -> tuple[Cluster, int | None]:
    """The cluster with as many devices to a node as were asked for, and how many devices there are, if that was
    said; what was said twice has to agree."""
    given = [("--devices", devices), ("--nodes", nodes), ("--per-node", per_node)]
    for option, value in given:
        if value is not None and not 1 <= value <= MOST_DEVICES:
            raise TapasError(f"{option} {value}", "is not a number of them", f"give 1 to {MOST_DEVICES:,}")
    if per_node is not None:
        cluster = replace(cluster, per_node=per_node)
    if nodes is not None:
        there = nodes * cluster.per_node
        if devices not in (None, there):
            fact = f"{nodes} nodes of {cluster.per_node} are {there} devices"
            raise TapasError(f"--devices {devices} --nodes {nodes}", fact, "leave one of them out")
        devices = there
    if devices is not None and mesh is not None and mesh.devices != devices:
        fact = f"the mesh takes {mesh.devices} devices, but there are {devices}"
        raise TapasError(f"--mesh {mesh}", fact, "leave the mesh out to have all meshes tried, or correct one of them")
    return cluster, devices
