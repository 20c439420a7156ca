"""Figures of a device from measurements: those of a made-up one are found again, and a real one's are used."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tapas.calibrate.fit import Sample, fit_family, quality, with_family
from tapas.calibrate.launches import operator_seconds
from tapas.calibrate.links import FASTER, SLOWEST, MeasuredLink, Message, fit_link
from tapas.calibrate.probes import Probe, Sizes, probes
from tapas.calibrate.profile import Profile, check, measure
from tapas.calibrate.ranks import Ranks
from tapas.calibrate.timing import Stopwatch
from tapas.cli.main import app
from tapas.cost.collectives import AxisLink, collective_seconds
from tapas.errors import TapasError
from tapas.hardware.cluster import COLLECTIVES, Link
from tapas.hardware.cluster_files import cluster_from_dict, clusters
from tapas.hardware.cluster_toml import toml_text
from tapas.hardware.efficiency import FAMILIES, Efficiency
from tapas.report import text_of
from tapas.report.calibrate import calibration_dict, calibration_page, draw_calibration
from tapas.util import silent
from tests.properties import examples

SMALL = Sizes(rows=64, widths=(16, 32, 64), lengths=(16, 32), classes=128, image=8, elements=(1 << 10, 1 << 13))
DEVICE = clusters()["h200-sxm"].device
TRUTH = {
    "matmul": Efficiency(flops=0.7, half_dim=20.0, even=0.5, odd=0.25, forward=0.83, backward=0.83),
    "norm": Efficiency(forward=0.4, backward=0.2),
    "attention": Efficiency(flops=0.5, half_dim=30.0, half_length=10.0, forward=0.83, backward=0.83, back=3.0),
}


def works(probe: Probe) -> Sequence:
    return probe.work(probe.module(torch.float32, torch.device("cpu")))


@pytest.mark.parametrize("family", TRUTH)
def test_figures_that_made_the_measurements_are_found_again(family: str) -> None:
    """From samples that the cost model itself made, with the figures unknown to the fit."""
    quick = replace(DEVICE, launch_seconds=0.0, memory_bytes_per_s=1e18 if family != "norm" else 1e12)
    real, samples = with_family(quick, family, TRUTH[family]), []
    for probe in probes(SMALL):
        if probe.family == family:
            blank = Sample(family, probe.title, works(probe), 1.0, 1.0)
            samples.append(replace(blank, **dict(zip(("forward", "backward"), blank.predicted(real), strict=True))))
    found = fit_family(with_family(quick, family, Efficiency()), family, samples)
    assert quality(found, family, samples).worst < 1e-3
    figures = found.family(family).figures()
    for key in ("even", "odd", "back") if family != "norm" else ("forward", "backward"):
        if key in TRUTH[family].figures():
            assert figures[key] == pytest.approx(getattr(TRUTH[family], key), rel=0.01)


def messages_of(link: Link, size: int) -> list[Message]:
    ring = AxisLink.of(size, link)
    sizes = [1 << n for n in range(12, 27, 3)]
    return [Message(kind, n, float(collective_seconds(kind, n, ring))) for kind in COLLECTIVES for n in sizes]


def test_links_that_made_the_messages_are_found_again() -> None:
    link, size = Link(3e9, 4e-5), 4
    found = fit_link(messages_of(link, size), size)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.02)
    assert found.latency_seconds == pytest.approx(link.latency_seconds, rel=0.02)


def test_what_two_figures_cannot_say_is_kept_by_collective_and_size() -> None:
    link, size = Link(3e9, 4e-5), 4
    slower = {"all_to_all": 1.3, "all_reduce": 0.8}
    messages = [replace(m, seconds=m.seconds * slower.get(m.kind, 1.0)) for m in messages_of(link, size)]
    held_up = [m if i != 7 else replace(m, seconds=3 * m.seconds) for i, m in enumerate(messages)]
    for some in (messages, held_up):
        found = MeasuredLink(fit_link(some, size), size, tuple(some)).curved
        for message in messages:
            predicted = float(collective_seconds(message.kind, message.nbytes, AxisLink.of(size, found)))
            assert predicted == pytest.approx(message.seconds, rel=0.05)


@given(
    bytes_per_s=st.floats(1e8, 1e11), latency=st.floats(1e-6, 1e-4), size=st.integers(2, 16),
    held_up=st.lists(st.tuples(st.integers(0, 19), st.floats(1.0, 100.0)), max_size=2, unique_by=lambda m: m[0] % 5),
)  # fmt: skip
@settings(max_examples=examples(40))
def test_a_few_messages_that_were_held_up_say_little(
    bytes_per_s: float, latency: float, size: int, held_up: list[tuple[int, float]]
) -> None:
    link = Link(bytes_per_s, latency)
    messages = messages_of(link, size)
    for number, times in held_up:
        messages[number] = replace(messages[number], seconds=messages[number].seconds * times)
    found = fit_link(messages, size)
    for message in messages_of(link, size):
        if message.nbytes == 1 << 24:
            predicted = float(collective_seconds(message.kind, message.nbytes, AxisLink.of(size, found)))
            assert 0.5 < predicted / message.seconds < 2.0


@given(seconds=st.lists(st.floats(1e-7, 1.0), min_size=20, max_size=20))
@settings(max_examples=examples(40))
def test_no_link_is_faster_than_its_largest_messages_within_reason(seconds: list[float]) -> None:
    """Whatever was measured; at their bounds fits of noise ended up with 10 TB/s over loopback."""
    ring = AxisLink.of(4, Link(1.0, 0.0))
    messages = [replace(m, seconds=s) for m, s in zip(messages_of(Link(3e9, 4e-5), 4), seconds, strict=True)]
    found = fit_link(messages, 4)
    reached = max(float(collective_seconds(m.kind, m.nbytes, ring)) / m.seconds for m in messages if m.nbytes > 1 << 20)
    assert SLOWEST <= found.bytes_per_s <= max(FASTER * reached, SLOWEST)


def test_there_is_a_probe_for_every_family() -> None:
    measured = {probe.family for probe in probes(SMALL)} | {"optimizer", "narrow_optimizer"}
    assert set(FAMILIES) == measured
    for probe in probes(SMALL):
        families = {work.rule.kernels_of for work in works(probe) if not work.rule.view}
        assert families == {probe.family}, probe.title


@pytest.mark.parametrize("name", clusters())
def test_clusters_are_written_as_they_are_read(name: str) -> None:
    cluster = clusters()[name]
    again = cluster_from_dict(tomllib.loads(toml_text(cluster)))
    assert again.name == name
    assert again.device.memory_bytes_per_s == pytest.approx(cluster.device.memory_bytes_per_s, rel=1e-3)
    assert dict(again.device.families).keys() == dict(cluster.device.families).keys()


@pytest.fixture(scope="module")
def measured() -> Profile:
    return measure(Ranks(), torch.device("cpu"), "float32", "mine", "cpu-gloo", 3, silent, SMALL)


def test_one_device_is_measured(measured: Profile, tmp_path: Path) -> None:
    device = measured.cluster.device
    assert {fit.family for fit in measured.fits} == {probe.family for probe in probes(SMALL)}
    assert all(math.isfinite(fit.worst) for fit in measured.fits)
    assert device.peak("float32") > 1e8
    assert device.launch_seconds < 1e-3
    assert "links are those of cpu-gloo, not measured" in measured.cluster.source
    assert measured.cluster.overlap == clusters()["cpu-gloo"].overlap
    assert cluster_from_dict(tomllib.loads(toml_text(measured.cluster))).device.name == device.name
    text = text_of(calibration_page(measured), 100)
    assert "batch_norm" in text
    assert "differed by" in text
    assert calibration_dict(measured)["probes"][0]["family"] == "matmul"
    draw_calibration(measured, tmp_path / "fit.svg")
    assert "unfused_attention" in (tmp_path / "fit.svg").read_text()


def test_an_operator_of_a_program_takes_longer_than_the_shortest_kernel() -> None:
    """What the host does for it is not hidden on a CPU; in between are views, which have no price of their own."""
    watch, x = Stopwatch(torch.device("cpu"), rounds=5), torch.ones(64)
    assert watch(lambda: x.add_(1.0)) < operator_seconds(watch) < 1e-3


def test_a_busy_machine_is_said_not_written_down(measured: Profile) -> None:
    busy = replace(measured, spread=0.5)
    with pytest.raises(TapasError, match="50% longer at one time than at another"):
        check(busy, force=False)
    check(busy, force=True)


def test_messages_that_are_slower_than_larger_ones_are_said_not_written_down(measured: Profile) -> None:
    link = Link(3e9, 4e-5)
    quiet = replace(measured, spread=0.0, links={"intra": MeasuredLink(link, 4, tuple(messages_of(link, 4)))})
    check(quiet, force=False)
    held_up = [replace(m, seconds=1.0) if m.nbytes == 1 << 21 else m for m in messages_of(link, 4)]
    busy = replace(quiet, links={"intra": MeasuredLink(link, 4, tuple(held_up))})
    with pytest.raises(TapasError, match="all_reduce took 1e\\+03 ms for 2,097,152 bytes"):
        check(busy, force=False)
    check(busy, force=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-o", "mine.json"], "a cluster is written as TOML"),
        (["-o", "missing/mine.toml"], "the folder does not exist"),
        (["-o", "mine.toml", "--device", "tpu"], "there is none here"),
        (["-o", "mine.toml", "--dtype", "int8"], "is not measured"),
        (["-o", "mine.toml", "--like", "h101"], "there is no preset of this name"),
        (["-o", "mine.toml", "--plot", "fit.doc"], "are not drawn"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_begins(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["calibrate", *options])
    assert result.exit_code == 2
    assert words in result.stderr
