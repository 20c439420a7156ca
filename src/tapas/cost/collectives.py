"""The axes of a mesh as lines to send over: the time of many collectives at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from tapas.hardware.cluster import Link, Mesh
from tapas.sharding.steps import Sent


@dataclass(frozen=True)
class Wires:
    """What one collective of each of some steps is sent over: each has an axis of its own."""

    size: np.ndarray
    part: np.ndarray  # of a tensor that is sent
    bytes_per_s: np.ndarray
    hops: np.ndarray
    latency_seconds: np.ndarray

    def seconds(self, nbytes: np.ndarray, share: np.ndarray | float = 1.0) -> np.ndarray:
        """See `collective_seconds`; an all-reduce takes twice as long."""
        return self.part * nbytes / self.bytes_per_s + share * self.hops * self.latency_seconds


class Lines:
    def __init__(self, mesh: Mesh, links: Sequence[Link]) -> None:
        size, hops = np.array(mesh.sizes), np.array([ceil(log2(n)) for n in mesh.sizes])
        rates, latencies = ([link.bytes_per_s for link in links], [link.latency_seconds for link in links])
        self.axes = size, (size - 1) / size, np.array(rates), hops, np.array(latencies)
        self._known: dict[Sent, list[Wires]] = {}

    def of(self, sent: Sent) -> list[Wires]:
        """What some steps are sent over, axis by axis: tensors with the same layouts have the same steps."""
        if sent not in self._known:
            self._known[sent] = [Wires(*(figures[axes] for figures in self.axes)) for axes in sent.axes]
        return self._known[sent]
