"""The hardware a plan is made for: devices, links, and the mesh laid over them.

A cluster is nodes of `per_node` equal devices; one link speed within a node, one between nodes. A
mesh numbers the devices row-major, so that the innermost axis is contiguous: which link an axis
crosses follows from the sizes alone (`axis_link`). Figures are bytes, seconds and flops, never GB or
microseconds; files are checked for figures that can only be a wrong unit.
"""

import json
import operator
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import gcd, prod
from pathlib import Path
from typing import Any

from tapas.errors import ClusterError, nearest

DTYPES = ("float64", "float32", "bfloat16", "float16")
DEFAULT_NAMES = ("x", "y", "z")


@dataclass(frozen=True, slots=True)
class Link:
    """`bytes_per_s` is per device and one direction: what it can send while it receives as much."""

    bytes_per_s: float
    latency_seconds: float  # per step of a collective


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: tuple[tuple[str, float], ...]  # dense peak by dtype
    launch_seconds: float  # the shortest time a kernel takes
    efficiency: float  # share of the peak that large matrix products reach in practice

    def rate(self, dtype: str) -> float:
        """Flops per second in practice. What has no figure of its own counts as float32."""
        peaks = dict(self.flops_per_s)
        return peaks.get(dtype, peaks["float32"]) * self.efficiency


@dataclass(frozen=True, slots=True)
class Cluster:
    name: str
    device: Device
    per_node: int
    intra: Link
    inter: Link
    source: str  # where the figures come from, and which are assumed


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

# ---------------------------------------------------------------------------------------- meshes

MESH_REMEDY = "write the axis sizes outermost first, such as 8, 2x4 or dp=2,tp=4"


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
            raise ClusterError(place, f"{part.strip()!r} has no name", "name all axes or none, such as dp=2,tp=4")
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
    members in every node it touches sends out of the node over k network cards at once.
    """
    stride = prod(mesh.sizes[axis + 1 :])
    span = stride * mesh.sizes[axis]
    within = mesh.devices <= cluster.per_node or cluster.per_node % span == 0
    if within or mesh.sizes[axis] == 1:
        return cluster.intra
    if cluster.per_node % stride:  # no two members in a node, or not as many in each: count on one
        return cluster.inter
    # Where span and per_node do not divide each other, groups are cut at multiples of their gcd.
    members = gcd(span, cluster.per_node) // stride
    fastest = min(cluster.intra.bytes_per_s, members * cluster.inter.bytes_per_s)
    return Link(fastest, cluster.inter.latency_seconds)


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


# -------------------------------------------------------------------------------------- clusters


@cache
def _presets() -> dict[str, Cluster]:
    text = resources.files("tapas.hardware").joinpath("clusters.toml").read_text(encoding="utf-8")
    return {name: cluster_from_dict({"name": name, **data}, name) for name, data in tomllib.loads(text).items()}


def clusters() -> dict[str, Cluster]:
    """The clusters known by name."""
    return dict(_presets())


def load_cluster(cluster: str | Path | Cluster) -> Cluster:
    """A cluster from its preset name or from a TOML or JSON file of the user's."""
    if isinstance(cluster, Cluster):
        return cluster
    if not isinstance(cluster, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]  # users' input
        fact = f"it is a {type(cluster).__name__}"
        raise ClusterError("cluster", fact, "give a preset's name, the path of a file, or a tapas.Cluster")
    if isinstance(cluster, str) and cluster in _presets():
        return _presets()[cluster]
    path = Path(cluster)
    looks_like_a_file = path.suffix.lower() in (".toml", ".json") or len(path.parts) > 1 or path.is_file()
    if isinstance(cluster, Path) or looks_like_a_file:
        return _read_cluster(path)
    remedy = f"{nearest(cluster, sorted(_presets()))} A .toml or .json file works too"
    raise ClusterError(f"cluster {cluster!r}", "there is no preset of this name", remedy)


def _read_cluster(path: Path) -> Cluster:
    place = f"cluster file {path}"
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except OSError as error:
        remedy = f"give the path of a file, or a preset: {', '.join(_presets())}"
        raise ClusterError(place, f"cannot be read ({error.strerror or error})", remedy) from None
    except (ValueError, RecursionError) as error:  # includes both decoders' and Unicode errors
        kind = "JSON" if path.suffix.lower() == ".json" else "TOML"
        raise ClusterError(place, f"is not valid {kind} ({error})", "correct it there") from None
    if isinstance(data, dict):
        data = {"name": path.stem, "source": f"given by the user in {path.name}", **data}
    return cluster_from_dict(data, place)


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Plain values for JSON or TOML; `cluster_from_dict` is the way back."""
    device = cluster.device
    return {
        "name": cluster.name,
        "per_node": cluster.per_node,
        "source": cluster.source,
        "device": {
            "name": device.name,
            "memory_bytes": device.memory_bytes,
            "memory_bytes_per_s": device.memory_bytes_per_s,
            "launch_seconds": device.launch_seconds,
            "efficiency": device.efficiency,
            "flops_per_s": dict(device.flops_per_s),
        },
        "intra": {"bytes_per_s": cluster.intra.bytes_per_s, "latency_seconds": cluster.intra.latency_seconds},
        "inter": {"bytes_per_s": cluster.inter.bytes_per_s, "latency_seconds": cluster.inter.latency_seconds},
    }


def cluster_from_dict(data: Any, place: str = "cluster") -> Cluster:
    """A cluster from plain values, every one of them checked. A link may also give an `efficiency`:
    the share of `bytes_per_s` that collectives reach, multiplied in here."""
    whole = _Table(data, place, "", ("name", "per_node", "source", "device", "intra", "inter"))
    device = whole.table(
        "device",
        ("name", "memory_bytes", "memory_bytes_per_s", "launch_seconds", "efficiency", "flops_per_s"),
    )
    peaks = device.table("flops_per_s", DTYPES)
    return Cluster(
        name=whole.text("name"),
        device=Device(
            name=device.text("name"),
            memory_bytes=round(device.number("memory_bytes", MEMORY)),
            memory_bytes_per_s=device.number("memory_bytes_per_s", BANDWIDTH),
            flops_per_s=tuple((d, peaks.number(d, FLOPS)) for d in DTYPES if d in peaks.data or d == "float32"),
            launch_seconds=device.number("launch_seconds", SECONDS),
            efficiency=device.number("efficiency", SHARE),
        ),
        per_node=whole.integer("per_node", COUNT),
        intra=_link(whole, "intra"),
        inter=_link(whole, "inter"),
        source=whole.text("source"),
    )


def _link(whole: "_Table", key: str) -> Link:
    table = whole.table(key, ("bytes_per_s", "latency_seconds", "efficiency"))
    share = table.number("efficiency", SHARE) if "efficiency" in table.data else 1.0
    return Link(table.number("bytes_per_s", BANDWIDTH) * share, table.number("latency_seconds", SECONDS))


# ------------------------------------------------------------------- reading, with errors to match


@dataclass(frozen=True, slots=True)
class _Range:
    """The figures that make sense for a quantity, and what to write instead of the others."""

    low: float
    high: float
    remedy: str


TINY = 5e-324  # smallest positive float: "above zero" as an inclusive bound
MEMORY = _Range(1e6, 1e15, "give bytes, such as 80e9 for 80 GB")
BANDWIDTH = _Range(1e6, 1e15, "give bytes per second and one direction, such as 450e9 for 450 GB/s")
FLOPS = _Range(1e6, 1e18, "give flops per second, such as 989e12 for 989 TFLOPS")
SECONDS = _Range(0, 1, "give seconds, such as 3e-6 for 3 microseconds")
SHARE = _Range(TINY, 1, "give a share above 0 and up to 1, such as 0.6")
COUNT = _Range(1, 1e6, "give the number of devices in a node, 1 or more")


@dataclass(frozen=True, slots=True)
class _Table:
    """One table of a cluster description, which knows where it is for the errors."""

    data: Mapping[str, Any]
    place: str
    prefix: str
    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.data, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # users' input
            where = self.prefix.rstrip(".") or "the description"
            raise ClusterError(self.place, f"{where} is {self.data!r}", f"give a table with {', '.join(self.keys)}")
        for key in self.data:
            if key not in self.keys:
                raise ClusterError(self.place, f"unknown key {self.prefix}{key}", nearest(str(key), list(self.keys)))

    def get(self, key: str, remedy: str) -> Any:
        if key not in self.data:
            raise ClusterError(self.place, f"{self.prefix}{key} is missing", remedy)
        return self.data[key]

    def table(self, key: str, keys: tuple[str, ...]) -> "_Table":
        found = self.get(key, f"add a table {self.prefix}{key} with {', '.join(keys)}")
        return _Table(found, self.place, f"{self.prefix}{key}.", keys)

    def text(self, key: str) -> str:
        value = self.get(key, f"add {self.prefix}{key} as text")
        if not isinstance(value, str):
            raise ClusterError(self.place, f"{self.prefix}{key} is {value!r}", "give text in quotes")
        return value

    def number(self, key: str, allowed: _Range) -> float:
        value = self.get(key, allowed.remedy)
        # A bool is an int to Python; NaN fails every comparison.
        if isinstance(value, bool) or not isinstance(value, int | float) or not allowed.low <= value <= allowed.high:
            raise ClusterError(self.place, f"{self.prefix}{key} is {value!r}", allowed.remedy)
        return float(value)

    def integer(self, key: str, allowed: _Range) -> int:
        value = self.number(key, allowed)
        if value != int(value):
            raise ClusterError(self.place, f"{self.prefix}{key} is {value!r}", allowed.remedy)
        return int(value)
