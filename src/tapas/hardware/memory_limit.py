"""How much memory a device has for a plan, from what a user says."""

import re

from tapas.errors import TapasError
from tapas.hardware.cluster import Cluster

RESERVE = 0.1  # of a device's memory: what the driver, libraries and fragmentation take
SMALL = 3e-3  # of a limit: what a plan may leave unused of it, so that copies need not differ in small things
DEVICE, NONE = "device", "none"
_UNITS = {
    "": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip


def device_limit(cluster: Cluster) -> float:
    """Bytes that a plan may use of a device's own memory."""
    return cluster.device.memory_bytes * (1 - RESERVE)


def memory_limit(memory: float | str | None, cluster: Cluster) -> float | None:
    """Bytes; given as a number, a text such as "40GB", "device" for the device's own less a reserve, or "none"."""
    if memory is None or memory == NONE:
        return None
    if memory == DEVICE:
        return device_limit(cluster)
    if isinstance(memory, (int, float)) and not isinstance(memory, bool) and 0 < memory < float("inf"):
        return float(memory)
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([a-z]*)\s*", str(memory).lower())
    nbytes = float(found[1]) * _UNITS[found[2]] if found and found[2] in _UNITS else 0.0
    if nbytes <= 0:
        remedy = f"write e.g. 40GB or 64GiB, {DEVICE} or {NONE}"
        raise TapasError(f"--memory {memory}", "is not an amount of memory", remedy)
    return nbytes
