"""How long collectives take on the links of a mesh, and with them the steps of a route."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2, prod

import numpy as np

from tapas.hardware.cluster import COLLECTIVES, MESSAGES, Cluster, Curves, Link
from tapas.hardware.mesh import Mesh, axis_link
from tapas.sharding.layout_grid import StepGroup
from tapas.sharding.routing import Router

Figure = np.ndarray | float
BUCKET_BYTES = 25_000_000  # gradients of whole weights are packed to about this size
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}  # of the tensor over the ring


@dataclass(frozen=True)
class AxisLink:
    """A ring of devices on one axis; or many at once, with an array for each figure."""

    size: Figure
    share: Figure  # of a tensor that is whole on this axis, which each device sends
    bytes_per_s: Figure
    hops: Figure
    latency_seconds: Figure
    times: np.ndarray | None = None  # [..., collective, size of the message], see `Link`

    @staticmethod
    def of(size: int, link: Link) -> "AxisLink":
        times = _table(link.curves(size)) if link.times else None
        return AxisLink(size, (size - 1) / size, link.bytes_per_s, ceil(log2(size)), link.latency_seconds, times)

    @property
    def figures(self) -> tuple[Figure, Figure, Figure, Figure, Figure]:
        return self.size, self.share, self.bytes_per_s, self.hops, self.latency_seconds

    def at(self, chosen: np.ndarray) -> "AxisLink":
        """Of many at once, those with these numbers, in an array of any shape."""
        size, share, bytes_per_s, hops, latency_seconds = (np.asarray(figure)[chosen] for figure in self.figures)
        times = None if self.times is None else self.times[chosen]
        return AxisLink(size, share, bytes_per_s, hops, latency_seconds, times)


def _together(links: Sequence[AxisLink]) -> AxisLink:
    size, share, bytes_per_s, hops, latency_seconds = map(np.array, zip(*(a.figures for a in links), strict=True))
    plain = np.ones((len(COLLECTIVES), len(MESSAGES)))
    times = np.stack([plain if a.times is None else a.times for a in links])
    return AxisLink(
        size, share, bytes_per_s, hops, latency_seconds, times if any(a.times is not None for a in links) else None
    )


def _table(known: Curves) -> np.ndarray:
    given = dict(known)
    curves = [given.get(kind, (1.0,)) for kind in COLLECTIVES]
    return np.array([[*curve, *[curve[-1]] * (len(MESSAGES) - len(curve))] for curve in curves])


def _times(kind: str, nbytes: Figure, times: np.ndarray) -> np.ndarray:
    """How many times as long as latency and bandwidth say: in between, in proportion to the logarithm of the size."""
    sizes, curves = np.log(MESSAGES), times[..., COLLECTIVES.index(kind), :]
    size = np.log(np.clip(nbytes, MESSAGES[0], MESSAGES[-1]))
    low = np.clip(np.searchsorted(sizes, size, "right") - 1, 0, len(sizes) - 2)
    part = (size - sizes[low]) / (sizes[low + 1] - sizes[low])
    curves = np.broadcast_to(curves, (*np.broadcast_shapes(curves.shape[:-1], np.shape(low)), len(sizes)))
    before, after = (np.take_along_axis(curves, np.expand_dims(i, -1), -1)[..., 0] for i in (low, low + 1))
    return before + part * (after - before)


def collective_seconds(kind: str, nbytes: Figure, axis: AxisLink, latency_share: Figure = 1.0) -> Figure:
    """Time of a collective. `nbytes` is the tensor that is whole on this axis, except for all_to_all, where it is
    what one device holds, for a ring, where it is what it passes on each time, and for a halo, where it is what one
    device sends. Tensors that are sent together pay a share of the latency each."""
    if kind == "halo":
        return nbytes / axis.bytes_per_s + axis.latency_seconds
    if kind == "ring":
        return (axis.size - 1) * (nbytes / axis.bytes_per_s + axis.latency_seconds)
    passes = PASSES[kind]
    once = axis.share * nbytes / axis.bytes_per_s + latency_share * axis.hops * axis.latency_seconds
    if axis.times is not None:
        once = once * _times(kind, nbytes / latency_share, axis.times)
    return passes * once


class Interconnect:
    """The links of a mesh on a cluster: what moves of tensors cost (see `sharding.routing.StepPrices`)."""

    def __init__(self, mesh: Mesh, cluster: Cluster) -> None:
        self.mesh, self.cluster = mesh, cluster
        self.axes = tuple(AxisLink.of(n, axis_link(cluster, mesh, axis)) for axis, n in enumerate(mesh.sizes))
        self._every_axis = _together(self.axes)
        self._links: dict[StepGroup, list[AxisLink]] = {}
        self._joint: dict[StepGroup, AxisLink] = {}
        device = cluster.device
        self._copied = {  # seconds for a byte that is copied, which is to read it and to write it
            "all_reduce": 2 / (device.memory_bytes_per_s * device.family("pointwise").forward),
            "": 2 / (device.memory_bytes_per_s * device.family("strided").forward),
        }

    def _joint_link(self, steps: StepGroup) -> AxisLink:
        """All axes of each step at once, as weights go."""
        if steps not in self._joint:
            chosen = (1 << steps.axes).sum(0)
            self._joint[steps] = self._every_set.at(chosen)
        return self._joint[steps]

    @cached_property
    def _every_set(self) -> AxisLink:
        """Of each set of axes, a bit for each axis; there is none without axes."""
        many = len(self.mesh.sizes)
        sets = [tuple(a for a in range(many) if chosen >> a & 1) or (0,) for chosen in range(1 << many)]
        return _together([self._merged(axes) for axes in sets])

    def _merged(self, axes: tuple[int, ...]) -> AxisLink:
        """A ring through all nodes that uses the cards of all members there; where axes lie apart, that of the slowest
        one."""
        sizes, first, last = self.mesh.sizes, axes[0], axes[-1]
        size = prod(sizes[a] for a in axes)
        if axes == tuple(range(first, last + 1)):
            merged = Mesh((*sizes[:first], size, *sizes[last + 1 :]))
            return AxisLink.of(size, axis_link(self.cluster, merged, first))
        links = [axis_link(self.cluster, self.mesh, a) for a in axes]
        slowest = min(links, key=lambda link: link.bytes_per_s)
        return AxisLink.of(size, replace(slowest, latency_seconds=max(k.latency_seconds for k in links)))

    def _links_of(self, steps: StepGroup) -> list[AxisLink]:
        """Axis by axis; tensors with the same layouts have the same steps."""
        if steps not in self._links:
            self._links[steps] = [self._every_axis.at(axes) for axes in steps.axes]
        return self._links[steps]

    def step_seconds(
        self, steps: StepGroup, split_nbytes: np.ndarray, whole_nbytes: np.ndarray, itemsize: int, copies: np.ndarray,
        share: float,
    ) -> Figure:  # fmt: skip
        copying = copies * whole_nbytes * self._copied.get(steps.kind, self._copied[""])
        return copying + self._sent_seconds(steps, split_nbytes, whole_nbytes, itemsize, share)

    def _sent_seconds(
        self, steps: StepGroup, split_nbytes: np.ndarray, whole_nbytes: np.ndarray, itemsize: int, share: float
    ) -> Figure:
        if share and steps.kind != "all_to_all":
            link = self._joint_link(steps)
            nbytes = whole_nbytes if steps.kind == "all_reduce" else split_nbytes * link.size
            return collective_seconds(steps.kind, nbytes, link, share)
        axes = self._links_of(steps)
        if steps.kind == "all_to_all":
            return collective_seconds(steps.kind, whole_nbytes, axes[0])
        total: Figure = np.zeros(len(split_nbytes))
        if steps.kind in ("all_gather", "reduce_scatter"):
            held = split_nbytes
            for axis in axes:  # over the slow outer axis while pieces are small: gathered first, scattered last
                held = held * axis.size
                total = total + collective_seconds(steps.kind, held, axis)
            return total
        held = whole_nbytes
        for axis in reversed(axes[1:]):  # scattered, then gathered again
            total = total + collective_seconds(steps.kind, held, axis)
            held = np.ceil(held / itemsize / axis.size) * itemsize
        return total + collective_seconds(steps.kind, held, axes[0])


class ClusterRouter(Router):
    """Routes on a mesh at the prices of a cluster's links; `passes` is how often a step goes forward and backward,
    `compiled` whether operators on the way are priced as torch.compile fuses them."""

    def __init__(self, mesh: Mesh, cluster: Cluster, passes: int = 1, compiled: bool = False) -> None:
        self.cluster, self.passes, self.compiled = cluster, passes, compiled
        device = cluster.device.compiled() if compiled else cluster.device
        self.links = Interconnect(mesh, replace(cluster, device=device).slowed(passes))
        super().__init__(mesh, self.links)
