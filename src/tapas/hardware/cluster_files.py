"""Clusters as files: the presets of clusters.toml and users' own, checked for figures that can only be a wrong unit."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from tapas.errors import ClusterError, nearest
from tapas.hardware.cluster import ANY, COLLECTIVES, MESSAGES, Cluster, Curves, Device, Link
from tapas.hardware.efficiency import FAMILIES, Efficiency

MEASURED = "h200-sxm"  # the preset whose families stand in for those that a device does not bring
RACKS = ("per_rack", "spine")
KEYS = ("name", "per_node", "switched", "source", "overlap", "device", "intra", "inter", *RACKS)
DTYPES = ("float64", "float32", "bfloat16", "float16")


@cache
def _presets() -> dict[str, Cluster]:
    text = resources.files("tapas.hardware").joinpath("clusters.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    measured = data[MEASURED]["device"]["families"]
    for one in data.values():
        if isinstance(like := one["intra"].get("times"), str):  # as on another preset
            one["intra"]["times"] = data[like]["intra"]["times"]
    return {name: _cluster({"name": name, **one}, name, measured) for name, one in data.items()}


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
        "overlap": cluster.overlap,
        **({} if cluster.switched else {"switched": False}),
        "device": {
            "name": device.name,
            "memory_bytes": device.memory_bytes,
            "memory_bytes_per_s": device.memory_bytes_per_s,
            "launch_seconds": device.launch_seconds,
            "host_seconds": device.host_seconds,
            "efficiency": device.efficiency,
            "flops_per_s": dict(device.flops_per_s),
            "families": {name: device.family(name).figures() for name in FAMILIES},
        },
        "intra": _link_dict(cluster.intra),
        "inter": _link_dict(cluster.inter),
        **({} if cluster.spine is None else {"per_rack": cluster.per_rack, "spine": _link_dict(cluster.spine)}),
    }


def _link_dict(link: Link) -> dict[str, Any]:
    by_devices = {str(devices): {kind: list(curve) for kind, curve in curves} for devices, curves in link.times}
    times = by_devices.pop(str(ANY), by_devices)
    return {
        "bytes_per_s": link.bytes_per_s, "latency_seconds": link.latency_seconds, **({"times": times} if times else {}),
    }  # fmt: skip


def cluster_from_dict(data: Any, place: str = "cluster") -> Cluster:
    """A cluster from plain values, every one of them checked. A link may also give an `efficiency`:
    the share of `bytes_per_s` that collectives reach, multiplied in here. Families that a device does not bring are
    those of the preset that was measured."""
    return _cluster(data, place, _presets_measured())


@cache
def _presets_measured() -> Mapping[str, Any]:
    return {name: efficiency.figures() for name, efficiency in _presets()[MEASURED].device.families}


def _cluster(data: Any, place: str, measured: Mapping[str, Any]) -> Cluster:
    whole = _Table(data, place, "", KEYS)
    device = whole.table(
        "device",
        (
            "name",
            "memory_bytes",
            "memory_bytes_per_s",
            "launch_seconds",
            "host_seconds",
            "efficiency",
            "flops_per_s",
            "families",
        ),
    )
    efficiency = device.number("efficiency", SHARE)
    peaks = device.table("flops_per_s", DTYPES)
    return Cluster(
        name=whole.text("name"),
        device=Device(
            name=device.text("name"),
            memory_bytes=round(device.number("memory_bytes", MEMORY)),
            memory_bytes_per_s=device.number("memory_bytes_per_s", BANDWIDTH),
            flops_per_s=tuple((d, peaks.number(d, FLOPS)) for d in DTYPES if d in peaks.data or d == "float32"),
            launch_seconds=device.number("launch_seconds", SECONDS),
            efficiency=efficiency,
            families=_families(device, measured, efficiency),
            host_seconds=device.number("host_seconds", SECONDS) if "host_seconds" in device.data else 0.0,
        ),
        per_node=whole.integer("per_node", COUNT),
        intra=_link(whole, "intra"),
        inter=_link(whole, "inter"),
        source=whole.text("source"),
        overlap=whole.number("overlap", PART) if "overlap" in whole.data else 1.0,
        switched=whole.flag("switched", default=True),
        **_racks(whole),
    )


def _racks(whole: "_Table") -> dict[str, Any]:
    """Both or none of the two that say what lies between racks."""
    if not any(key in whole.data for key in RACKS):
        return {}
    per_rack, per_node = whole.integer("per_rack", COUNT), whole.integer("per_node", COUNT)
    if per_rack % per_node or per_rack == per_node:
        fact = f"{per_rack} devices are not several nodes of {per_node}"
        raise ClusterError(f"{whole.place}: per_rack", fact, "give the devices of a rack: some nodes times per_node")
    return {"per_rack": per_rack, "spine": _link(whole, "spine")}


def _families(device: "_Table", measured: Mapping[str, Any], efficiency: float) -> tuple[tuple[str, Efficiency], ...]:
    """Matrix products reach the device's `efficiency`: that fact has its place there."""
    known = tuple(field.name for field in fields(Efficiency))
    own: Mapping[str, Any] = device.table("families", FAMILIES).data if "families" in device.data else {}
    given = _Table({**measured, **own}, device.place, f"{device.prefix}families.", FAMILIES)
    found: dict[str, Efficiency] = {}
    for name in FAMILIES:
        if name in given.data:
            table = given.table(name, known)
            found[name] = Efficiency(**{key: table.number(key, _RANGES.get(key, SHARE)) for key in table.data})
    if "matmul" in found:
        found["matmul"] = replace(found["matmul"], flops=efficiency)
    return tuple(found.items())


def _link(whole: "_Table", key: str) -> Link:
    table = whole.table(key, ("bytes_per_s", "latency_seconds", "efficiency", "times"))
    share = table.number("efficiency", SHARE) if "efficiency" in table.data else 1.0
    times = _times(table) if "times" in table.data else ()
    return Link(table.number("bytes_per_s", BANDWIDTH) * share, table.number("latency_seconds", SECONDS), times)


def _times(link: "_Table") -> tuple[tuple[int, Curves], ...]:
    """By collective; or by how many devices take part, and then by collective."""
    given = link.data["times"]
    if not isinstance(given, Mapping) or not any(str(key).isdigit() for key in cast("Mapping[Any, Any]", given)):
        return ((ANY, _curves(link.table("times", COLLECTIVES))),)
    counts = tuple(str(n) for n in cast("Mapping[Any, Any]", given) if str(n).isdigit() and int(n) > ANY)
    sized = link.table("times", counts)
    return tuple((int(count), _curves(sized.table(count, COLLECTIVES))) for count in counts)


def _curves(times: "_Table") -> Curves:
    return tuple((kind, times.numbers(kind, FACTOR, len(MESSAGES))) for kind in COLLECTIVES if kind in times.data)


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
PART = _Range(0, 1, "give a share from 0 to 1, such as 0.9")
SIZE = _Range(0, 1e6, "give a number of elements, such as 64")
TIMES = _Range(0, 100, "give how often the forward pass takes its time again, such as 2.5")
_RANGES = {"half_dim": SIZE, "half_length": SIZE, "back": TIMES, "launches": TIMES, "keeps": PART}  # others are shares
FACTOR = _Range(1e-3, 1e3, "give how many times as long it takes as latency and bandwidth say, such as 1.3")
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

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise ClusterError(self.place, f"{self.prefix}{key} is {value!r}", "give true or false")
        return value

    def number(self, key: str, allowed: _Range) -> float:
        value = self.get(key, allowed.remedy)
        # A bool is an int to Python; NaN fails every comparison.
        if isinstance(value, bool) or not isinstance(value, int | float) or not allowed.low <= value <= allowed.high:
            raise ClusterError(self.place, f"{self.prefix}{key} is {value!r}", allowed.remedy)
        return float(value)

    def numbers(self, key: str, allowed: _Range, most: int) -> tuple[float, ...]:
        """One or more of them."""
        values = self.get(key, f"add a list {self.prefix}{key}")
        if not isinstance(values, list) or not 1 <= len(cast("list[Any]", values)) <= most:
            raise ClusterError(self.place, f"{self.prefix}{key} is {values!r}", f"give a list of 1 to {most} numbers")
        named = {f"{key}[{i}]": value for i, value in enumerate(cast("list[Any]", values))}
        inner = _Table(named, self.place, self.prefix, tuple(named))
        return tuple(inner.number(name, allowed) for name in named)

    def integer(self, key: str, allowed: _Range) -> int:
        value = self.number(key, allowed)
        if value != int(value):
            raise ClusterError(self.place, f"{self.prefix}{key} is {value!r}", allowed.remedy)
        return int(value)
