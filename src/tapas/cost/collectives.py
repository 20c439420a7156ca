"""How long collectives take on the links of a mesh, and with them the steps of a route."""

from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from tapas.hardware.cluster import Cluster, Link
from tapas.hardware.mesh import Mesh, axis_link
from tapas.sharding.layout_grid import StepGroup
from tapas.sharding.routing import Router

Figure = np.ndarray | float
BUCKET_BYTES = 25_000_000  # gradients of weights that need the same reduction are packed to about this size
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}  # of the tensor over the ring


@dataclass(frozen=True)
class AxisLink:
    """A ring of devices on one axis; or many at once, with an array for each figure."""

    size: Figure
    share: Figure  # of a tensor that is whole on this axis, which each device sends
    bytes_per_s: Figure
    hops: Figure
    latency_seconds: Figure

    @staticmethod
    def of(size: int, link: Link) -> "AxisLink":
        return AxisLink(size, (size - 1) / size, link.bytes_per_s, ceil(log2(size)), link.latency_seconds)


def collective_seconds(kind: str, nbytes: Figure, axis: AxisLink, latency_share: Figure = 1.0) -> Figure:
    """Time of a collective. `nbytes` is the tensor that is whole on this axis, except for all_to_all, where it is
    what one device holds. Tensors that are sent together pay a share of the latency each."""
    once = axis.share * nbytes / axis.bytes_per_s + latency_share * axis.hops * axis.latency_seconds
    return PASSES.get(kind, 0) * once


class Interconnect:
    """The links of a mesh on a cluster: what moves of tensors cost (see `sharding.routing.StepPrices`)."""

    def __init__(self, mesh: Mesh, cluster: Cluster) -> None:
        self.mesh, self.cluster = mesh, cluster
        self.axes = tuple(AxisLink.of(n, axis_link(cluster, mesh, axis)) for axis, n in enumerate(mesh.sizes))
        fields = zip(*((a.size, a.share, a.bytes_per_s, a.hops, a.latency_seconds) for a in self.axes), strict=True)
        self._figures = tuple(map(np.array, fields))
        self._links: dict[StepGroup, list[AxisLink]] = {}

    def _links_of(self, steps: StepGroup) -> list[AxisLink]:
        """Axis by axis; tensors with the same layouts have the same steps."""
        if steps not in self._links:
            self._links[steps] = [AxisLink(*(figures[axes] for figures in self._figures)) for axes in steps.axes]
        return self._links[steps]

    def step_seconds(
        self, steps: StepGroup, split_nbytes: np.ndarray, whole_nbytes: np.ndarray, itemsize: int, packed: np.ndarray
    ) -> Figure:
        axes = self._links_of(steps)
        if steps.kind == "all_to_all":
            return collective_seconds(steps.kind, whole_nbytes, axes[0])
        total: Figure = np.zeros(len(split_nbytes))
        if steps.kind == "all_gather":
            held = split_nbytes
            for axis in axes:  # gather over the slow outer axis while pieces are small
                held = held * axis.size
                total = total + collective_seconds("all_gather", held, axis)
        elif steps.kind == "all_reduce":
            held = whole_nbytes
            latency_share = np.where(packed, np.minimum(held / BUCKET_BYTES, 1.0), 1.0)
            for axis in reversed(axes[1:]):  # scattered, then gathered again
                total = total + collective_seconds("all_reduce", held, axis, latency_share)
                held = np.ceil(held / itemsize / axis.size) * itemsize
            total = total + collective_seconds("all_reduce", held, axes[0], latency_share)
        return total


class ClusterRouter(Router):
    """Routes on a mesh at the prices of a cluster's links."""

    def __init__(self, mesh: Mesh, cluster: Cluster) -> None:
        self.cluster, self.links = cluster, Interconnect(mesh, cluster)
        super().__init__(mesh, self.links)
