"""Attention whose keys are split: ranks that pass keys and values on compute what one device does."""

from typing import Any
from unittest.mock import patch

import pytest

from tapas.planner.pipeline import plan_graph, router_of
from tapas.planner.request import Request
from tapas.verify import verification
from tapas.verify.subject import Subject
from tapas.verify.verification import Report
from tests.distributed.small import EAGER
from tests.subjects import small_subject
from tests.verify.test_verify import expect

full = pytest.mark.full
ATTENTION = {"aten.scaled_dot_product_attention.default", "tapas.window_attention.default"}


def examined(
    found: Subject, mesh: str, pin: str = "ring", processes: bool = False, steps: int = 3, **asked: Any
) -> Report:
    request = Request.of(mesh, EAGER, pins={"*": pin}, baselines=False, **asked)
    plan = plan_graph(found.graph, request)
    layers = [op for op in plan.operators if op.target in ATTENTION]
    assert layers and all({"ring", "near", "l"} & {*op.choice} for op in layers)
    with patch.object(verification, "PRECISIONS", ("float64",)):
        return verification.examine(found, plan.assignment, router_of(request), in_process=not processes, steps=steps)


# Llama's is causal and shares KV heads; ViT's is neither, of 17 tokens; DeepSeek's keys are wider than its values.
@pytest.mark.parametrize("family", ["llama", "vit", pytest.param("deepseek_v3", marks=full)])
@pytest.mark.parametrize("mesh", ["4", pytest.param("2", marks=full)])
def test_models(family: str, mesh: str) -> None:
    report = examined(small_subject(family), mesh)
    expect(report)
    assert {sent.phase for sent in report.sent["float64"] if sent.kind == "ring"} == {"forward", "backward"}


# causal, full, and over a window
@pytest.mark.parametrize("family", ["mistral", *(pytest.param(name, marks=full) for name in ("llama", "vit"))])
def test_gathered(family: str) -> None:
    """Queries are split, keys and values whole: their gradients are added up."""
    report = examined(small_subject(family), "4", "l")
    expect(report)
    assert not any(sent.kind == "ring" for sent in report.sent["float64"])


@pytest.mark.parametrize(("family", "mesh", "pin"), [
    ("mistral", "4", "near"), pytest.param("mistral", "2x2", "[h, near]", marks=full),
    pytest.param("mistral", "2x2", "[near, batch]", marks=full),
])  # fmt: skip
def test_neighbours_within_a_window(family: str, mesh: str, pin: str) -> None:
    report = examined(small_subject(family), mesh, pin)
    expect(report)
    kinds = {sent.kind for sent in report.sent["float64"]}
    assert "halo" in kinds and "ring" not in kinds


@pytest.mark.parametrize("pin", ["[ring, kv]", pytest.param("[batch, ring]", marks=full)])
def test_beside_other_splits(pin: str) -> None:
    expect(examined(small_subject("llama"), "2x2", pin))


@pytest.mark.parametrize("recompute", ["selective", pytest.param("block", marks=full)])
def test_computed_again(recompute: str) -> None:
    """A selective block keeps what a ring has computed: nothing is passed round again."""
    report, kept = (examined(small_subject("llama"), "2", recompute=mode) for mode in (recompute, "none"))
    expect(report)
    again, once = (
        sum(s.executed_nbytes for s in some.sent["float64"] if s.kind == "ring" and s.phase == "forward")
        for some in (report, kept)
    )
    assert again == once * (2 if recompute == "block" else 1)
