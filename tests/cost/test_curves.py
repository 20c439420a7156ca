"""What messages take beyond latency and bandwidth: by collective and size, on every way a price is made."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tapas.cost.collectives import AxisLink, ClusterRouter, collective_seconds
from tapas.hardware.cluster import ANY, COLLECTIVES, MESSAGES, Link
from tapas.hardware.cluster_files import load_cluster
from tapas.hardware.mesh import Mesh, axis_link
from tapas.ir.graph import Tensor
from tapas.sharding.layout import B, P, S

CLUSTER = load_cluster("h100-sxm")
LINK = Link(1e9, 1e-5)
CURVE = (2.0, 1.0, 0.5)


def seconds(kind: str, nbytes: float | np.ndarray, link: Link) -> float | np.ndarray:
    return collective_seconds(kind, nbytes, AxisLink.of(4, link))


def test_figures_count_at_their_sizes_and_in_between() -> None:
    curved = replace(LINK, times=((ANY, (("all_gather", CURVE),)),))
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
    cluster = replace(CLUSTER, per_node=4, intra=replace(CLUSTER.intra, times=()))
    times = ((ANY, tuple((kind, (3.0,)) for kind in COLLECTIVES)),)
    flat = replace(cluster, intra=replace(cluster.intra, times=times), inter=replace(cluster.inter, times=times))
    slow = replace(cluster, intra=cluster.intra.slowed(3.0), inter=cluster.inter.slowed(3.0))
    curved, slowed = (ClusterRouter(Mesh(mesh), c).space(weight, [P, S(0), S(1)], packed) for c in (flat, slow))
    np.testing.assert_allclose(curved.seconds, slowed.seconds, rtol=1e-9)


def test_what_travels_together_counts_by_its_buffer() -> None:
    curved = AxisLink.of(4, replace(LINK, times=((ANY, (("all_gather", CURVE),)),)))
    nbytes, share = MESSAGES[0], 1 / 64
    alone = collective_seconds("all_gather", nbytes, AxisLink.of(4, LINK), share)
    assert collective_seconds("all_gather", nbytes, curved, share) == pytest.approx(0.5 * float(alone))


@pytest.mark.parametrize("mesh", [(4,), (2, 4)])
@pytest.mark.parametrize("packed", [0.0, 0.25])
def test_each_collective_of_a_move_has_its_own_curve(mesh: tuple[int, ...], packed: float) -> None:
    """What is gathered forward is scattered backward, and the other way round for partial sums."""
    tensor = Tensor("t", (512, 384), "bfloat16", True)
    plain = replace(CLUSTER, per_node=64, intra=replace(CLUSTER.intra, times=()))
    scattering = replace(plain, intra=replace(plain.intra, times=((ANY, (("reduce_scatter", (3.0,)),)),)))
    whole, split, sums = ([state] * len(mesh) for state in (B, S(0), P))
    steps = []
    for cluster in (plain, scattering):
        space = ClusterRouter(Mesh(mesh), cluster).space(tensor, [P, S(0)], packed)
        each = [space.find((*layout[:-1], *split[-1:])) for layout in (split, split)]
        ends = [space.find((*split[:-1], *layout[-1:])) for layout in (whole, sums)]
        steps.append([space.step(each[0], ends[0]), space.step(ends[1], each[1])])
    (gathered, summed), (gathered3, summed3) = steps
    assert gathered3.forward_seconds == pytest.approx(gathered.forward_seconds)
    assert gathered3.backward_seconds == pytest.approx(3 * gathered.backward_seconds)
    assert summed3.forward_seconds == pytest.approx(3 * summed.forward_seconds)
    assert summed3.backward_seconds == pytest.approx(summed.backward_seconds)


def test_curves_are_those_of_as_many_devices() -> None:
    """Or of the number that comes nearest."""
    known = tuple((devices, (("all_gather", (float(devices),)),)) for devices in (2, 8))
    link = replace(LINK, times=known)
    for devices, times in ((2, 2.0), (3, 2.0), (5, 8.0), (8, 8.0), (64, 8.0)):
        ratio = [
            float(collective_seconds("all_gather", 1e6, AxisLink.of(devices, one)))
            for one in (link, replace(LINK, times=()))
        ]
        assert ratio[0] / ratio[1] == pytest.approx(times)


def test_pairs_of_a_board_without_a_switch_are_not_slowed_down_twice() -> None:
    known = tuple((devices, (("all_gather", (float(devices),)),)) for devices in (2, 4))
    board = replace(CLUSTER, per_node=4, switched=False, intra=replace(LINK, times=known))
    pair, switched = (axis_link(one, Mesh((2,)), 0) for one in (board, replace(board, switched=True)))
    assert switched.curves(2) == known[0][1] and pair.curves(2) == known[1][1]
    assert pair.bytes_per_s == pytest.approx(switched.bytes_per_s / 3)


def test_a_node_of_h100s_takes_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves go through every third size; between these, from 8 MiB on, nothing is off by more than half of it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    links = importlib.import_module("links")
    for kind in COLLECTIVES:
        for devices in links.DEVICES:
            seconds = links.measured(kind, devices)
            sizes = [size for size in seconds if size >= 1 << 23]
            ratio = [links.priced(kind, devices, size, CLUSTER.intra) / seconds[size] for size in sizes]
            assert len(ratio) == 9 and max(abs(one - 1) for one in ratio) < 0.5
            assert np.median(np.abs(np.array(ratio) - 1)) < 0.05
        assert links.curves(CLUSTER.intra, 8)[kind] == list(dict(CLUSTER.intra.curves(8))[kind])
