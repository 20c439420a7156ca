"""A cluster as a TOML file, as `load_cluster` reads it."""

import json
from collections.abc import Mapping
from typing import Any, cast

from tapas.hardware.cluster import Cluster
from tapas.hardware.cluster_files import cluster_to_dict


def toml_text(cluster: Cluster) -> str:
    data = cluster_to_dict(cluster)
    device, intra, inter = (data.pop(key) for key in ("device", "intra", "inter"))
    families = device.pop("families")
    spine = data.pop("spine", None)
    tables = {"device": device, "device.families": families, "intra": intra, "inter": inter}
    tables |= {"spine": spine} if spine else {}
    parts = [_lines(data), *(f"[{name}]\n{_lines(table)}" for name, table in tables.items())]
    return "\n".join(parts)


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: Any) -> str:
    """Figures to four digits: more were never measured."""
    if isinstance(value, dict):
        known = cast("dict[str, Any]", value)
        return "{ " + ", ".join(f"{key} = {_value(some)}" for key, some in known.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, cast("list[Any]", value))) + "]"
    return json.dumps(value) if isinstance(value, str | int) else f"{value:.4g}"
