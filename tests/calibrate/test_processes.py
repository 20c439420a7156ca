"""Links between real processes."""

import torch
import torch.distributed as dist

from tapas.calibrate import links as links_module
from tapas.calibrate.links import FASTER, SLOWEST, MeasuredLink, measure_link, measure_overlap
from tapas.calibrate.ranks import Ranks
from tapas.calibrate.timing import Stopwatch
from tapas.cost.collectives import AxisLink, collective_seconds
from tapas.hardware.cluster import COLLECTIVES, Link
from tapas.util import silent
from tests.distributed.pool import Pool

WORLD = 4
BYTES = AxisLink.of(WORLD, Link(1.0, 0.0))  # on which seconds are bytes


def links(rank: int) -> tuple[MeasuredLink, float]:
    links_module.LARGEST = {"cpu": 1 << 21}
    ranks = Ranks(rank, WORLD, WORLD, dist.group.WORLD)
    watch = Stopwatch(torch.device("cpu"), 3, lambda value: ranks.mean([value])[0], 1e-3)
    found = measure_link(ranks.inner, ranks, watch, silent, "here")
    return found, measure_overlap(ranks.inner, ranks, watch)


def test_links_are_measured_alike_by_all(pool: Pool) -> None:
    (found, overlap), *others = pool(links)
    assert all(other == (found, overlap) for other in others)
    assert {message.kind for message in found.messages} == set(COLLECTIVES)
    assert found.size == WORLD
    reached = max(float(collective_seconds(m.kind, m.nbytes, BYTES)) / m.seconds for m in found.messages)
    assert SLOWEST <= found.link.bytes_per_s <= max(FASTER * reached, SLOWEST)  # however busy the machine is
    assert 0.0 <= overlap <= 1.0
