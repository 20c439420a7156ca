"""What a plan says where the host is slower than the devices."""

from dataclasses import replace

from tapas.hardware.cluster_files import load_cluster
from tapas.planner.pipeline import plan_graph
from tapas.planner.request import Request
from tests.subjects import small_subject

WORDS = "the host launches operators too slowly"


def warned(host_seconds: float, **asked: bool) -> list[str]:
    cluster = load_cluster("h100-sxm")
    cluster = replace(cluster, device=replace(cluster.device, host_seconds=host_seconds))
    plan = plan_graph(small_subject("llama").graph, Request.of("2x2", cluster, **asked))
    return [text for text in plan.warnings if WORDS in text]


def test_a_slow_host_is_named_with_a_remedy() -> None:
    (text,) = warned(50e-6)
    assert "--compile" in text and "of the simulated step" in text
    (text,) = warned(50e-6, compile=True)
    assert "--compile" not in text


def test_a_fast_host_is_not() -> None:
    assert warned(1e-9) == []
