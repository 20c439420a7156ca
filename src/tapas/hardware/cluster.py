"""The hardware a plan is made for: devices and links, figures in bytes, seconds and flops, never GB or microseconds.

A cluster is nodes of `per_node` equal devices; one link speed within a node, one between nodes, and maybe a third one
between racks.
"""

import re
from dataclasses import dataclass, replace
from math import log

from tapas.errors import TapasError
from tapas.hardware.efficiency import Efficiency

RESERVE = 0.1  # of a device's memory: what the driver, libraries and fragmentation take
DEVICE, NONE = "device", "none"
_UNITS = {
    "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip


MESSAGES = tuple(1 << 12 + 3 * k for k in range(7))  # bytes, 4 KiB to 1 GiB: at these sizes links have been measured
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ANY = 1  # in place of a number of devices
Curves = tuple[tuple[str, tuple[float, ...]], ...]  # by collective, a figure for each size of MESSAGES


@dataclass(frozen=True, slots=True)
class Link:
    """`bytes_per_s` is per device and one direction: what it can send while it receives as much."""

    bytes_per_s: float
    latency_seconds: float  # per step of a collective
    # By how many devices take part and by collective, how many times as long as these two figures say it takes, for
    # messages of MESSAGES; the last figure is for larger ones, too. What is left out takes as long as they say.
    times: tuple[tuple[int, Curves], ...] = ()

    def slowed(self, times: float) -> "Link":
        return replace(self, bytes_per_s=self.bytes_per_s / times, latency_seconds=self.latency_seconds * times)

    def curves(self, devices: int) -> Curves:
        """Those of the number of devices that comes nearest."""
        return min(self.times, key=lambda known: abs(log(known[0] / devices)), default=(ANY, ()))[1]


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: tuple[tuple[str, float], ...]  # dense peak by dtype
    launch_seconds: float  # the shortest time a kernel takes
    efficiency: float  # share of the peak that large matrix products reach in practice
    families: tuple[tuple[str, Efficiency], ...] = ()  # what operators reach, see `family`
    host_seconds: float = 0.0  # for the processor beside it to launch an operator (eager); 0: that is not known

    def family(self, name: str) -> Efficiency:
        """What operators of a family reach; where nothing is known, as much as matrix products."""
        return dict(self.families).get(name) or Efficiency(flops=self.efficiency)

    def peak(self, dtype: str) -> float:
        """Flops per second. What has no figure of its own counts as float32."""
        peaks = dict(self.flops_per_s)
        return peaks.get(dtype, peaks["float32"])

    def slowed(self, times: float) -> "Device":
        """One on which everything takes so many times as long."""
        rates = tuple((dtype, flops / times) for dtype, flops in self.flops_per_s)
        return replace(
            self, memory_bytes_per_s=self.memory_bytes_per_s / times, flops_per_s=rates,
            launch_seconds=self.launch_seconds * times, host_seconds=self.host_seconds * times,
        )  # fmt: skip

    def compiled(self) -> "Device":
        """As torch.compile has it, which pads matrices where rows would begin at odd places."""
        families = tuple((name, replace(reached, even=1.0, odd=1.0)) for name, reached in self.families)
        return replace(self, families=families)

    def rate(self, dtype: str) -> float:
        """Flops per second of large matrix products."""
        return self.peak(dtype) * self.efficiency


@dataclass(frozen=True, slots=True)
class Cluster:
    name: str
    device: Device
    per_node: int
    intra: Link
    inter: Link
    source: str  # where the figures come from, and which are assumed
    overlap: float = 1.0  # of what is sent beside computation: the share that does not hold it up
    per_rack: int = 0  # devices between which `inter` is what it says; 0: all of them
    spine: Link | None = None  # between racks
    switched: bool = True  # within a node; otherwise every pair of devices has an equal part of their links to itself

    @property
    def levels(self) -> tuple[tuple[int, Link], ...]:
        """Groups of devices, and the link out of them."""
        racks = ((self.per_rack, self.spine),) if self.spine is not None else ()
        return ((self.per_node, self.inter), *racks)

    def slowed(self, times: float) -> "Cluster":
        """Everything on it takes so many times as long: what is done so many times in a step is priced there."""
        if times == 1:
            return self
        device, intra, inter = self.device.slowed(times), self.intra.slowed(times), self.inter.slowed(times)
        return replace(self, device=device, intra=intra, inter=inter, spine=self.spine and self.spine.slowed(times))


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
    if found and not found[2]:
        raise TapasError(f"--memory {memory}", "has no unit", f"write {memory}GB, {memory}GiB or {memory}B")
    nbytes = float(found[1]) * _UNITS[found[2]] if found and found[2] in _UNITS else 0.0
    if nbytes <= 0:
        remedy = f"write e.g. 40GB or 64GiB, {DEVICE} or {NONE}"
        raise TapasError(f"--memory {memory}", "is not an amount of memory", remedy)
    return nbytes
