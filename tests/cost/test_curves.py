"""What messages take beyond latency and bandwidth: by collective and size, on every way a price is made."""

from dataclasses import replace

import numpy as np
import pytest

from tapas.cost.collectives import AxisLink, ClusterRouter, collective_seconds
from tapas.hardware.cluster import COLLECTIVES, MESSAGES, Link
from tapas.hardware.cluster_files import load_cluster
from tapas.hardware.mesh import Mesh
from tapas.ir.graph import Tensor
from tapas.sharding.layout import P, S

CLUSTER = load_cluster("h100-sxm")
LINK = Link(1e9, 1e-5)
CURVE = (2.0, 1.0, 0.5)


def seconds(kind: str, nbytes: float | np.ndarray, link: Link) -> float | np.ndarray:
    return collective_seconds(kind, nbytes, AxisLink.of(4, link))


def test_figures_count_at_their_sizes_and_in_between() -> None:
    curved = replace(LINK, times=(("all_gather", CURVE),))
    sizes = np.array([1.0, *MESSAGES[:4], MESSAGES[-1], 1e12])
    ratio = seconds("all_gather", sizes, curved) / seconds("all_gather", sizes, LINK)
    assert ratio == pytest.approx([2.0, 2.0, 1.0, 0.5, 0.5, 0.5, 0.5])
    between = float(np.sqrt(MESSAGES[0] * MESSAGES[1]))
    assert seconds("all_gather", between, curved) == pytest.approx(1.5 * float(seconds("all_gather", between, LINK)))
    for kind in {*COLLECTIVES, "halo", "ring"} - {"all_gather"}:
        assert seconds(kind, 1e6, curved) == seconds(kind, 1e6, LINK)


@pytest.mark.parametrize("mesh", [(4,), (2, 4), (2, 2, 2)])
@pytest.mark.parametrize("packed", [0.0, 0.25])
def test_a_flat_curve_is_a_slower_link(mesh: tuple[int, ...], packed: float) -> None:
    """Within nodes and between them, over all axes and several at once."""
    weight = Tensor("t", (512, 384), "bfloat16", True)
    cluster = replace(CLUSTER, per_node=4)
    times = tuple((kind, (3.0,)) for kind in COLLECTIVES)
    flat = replace(cluster, intra=replace(cluster.intra, times=times), inter=replace(cluster.inter, times=times))
    slow = replace(cluster, intra=cluster.intra.slowed(3.0), inter=cluster.inter.slowed(3.0))
    curved, slowed = (ClusterRouter(Mesh(mesh), c).space(weight, [P, S(0), S(1)], packed) for c in (flat, slow))
    np.testing.assert_allclose(curved.seconds, slowed.seconds, rtol=1e-9)


def test_what_travels_together_counts_by_its_buffer() -> None:
    curved = AxisLink.of(4, replace(LINK, times=(("all_gather", CURVE),)))
    nbytes, share = MESSAGES[0], 1 / 64
    alone = collective_seconds("all_gather", nbytes, AxisLink.of(4, LINK), share)
    assert collective_seconds("all_gather", nbytes, curved, share) == pytest.approx(0.5 * float(alone))
