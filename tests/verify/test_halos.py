"""Positions dealt out: ranks that exchange borders with their neighbours compute what one device does, at batch 1."""

from typing import Any
from unittest.mock import patch

import pytest

from tapas.planner.pipeline import plan_graph, router_of
from tapas.planner.request import Request
from tapas.verify import verification
from tapas.verify.verification import Report
from tests.distributed.small import EAGER
from tests.subjects import small_subject
from tests.verify.test_verify import expect

full = pytest.mark.full


def examined(family: str, mesh: str, pin: str, processes: bool = False, steps: int = 3, **asked: Any) -> Report:
    found, request = small_subject(family), Request.of(mesh, EAGER, pins={"*": pin}, baselines=False, **asked)
    plan = plan_graph(found.graph, request)
    wanted = set(pin.strip("[]").replace(" ", "").split(","))
    layers = [op for op in plan.operators if "convolution" in op.target or ".conv" in op.target]
    reaching = [op for op in layers if wanted & set(op.choice)]
    assert len(reaching) > len(layers) / 2
    with patch.object(verification, "PRECISIONS", ("float64",)):
        return verification.examine(found, plan.assignment, router_of(request), in_process=not processes, steps=steps)


CASES = [
    ("unet", "2", "height"), ("unet", "4", "width"), ("unet", "2x2", "[height, width]"),
    ("volumes", "2", "width"), ("volumes", "4", "depth"), ("volumes", "2x2", "[depth, height]"),
    pytest.param("unet", "4", "height", marks=full), pytest.param("unet", "2x2", "[width, height]", marks=full),
    pytest.param("unet", "2x2", "[o, height]", marks=full), pytest.param("volumes", "2", "height", marks=full),
    pytest.param("volumes", "2x2x2", "[width, depth, height]", marks=full),
]  # fmt: skip


@pytest.mark.parametrize(("family", "mesh", "pin"), CASES)
def test_models(family: str, mesh: str, pin: str) -> None:
    report = examined(family, mesh, pin)
    expect(report)
    assert {sent.phase for sent in report.sent["float64"] if sent.kind == "halo"} == {"forward", "backward"}


@pytest.mark.parametrize("recompute", ["selective", "block"])
def test_computed_again(recompute: str) -> None:
    """A selective block keeps the borders of convolutions, and fetches those of pools again."""
    report, kept = (examined("residuals", "2", "height", recompute=mode) for mode in (recompute, "none"))
    expect(report)
    again, once = (
        sum(s.executed_nbytes for s in some.sent["float64"] if s.kind == "halo" and s.phase == "forward")
        for some in (report, kept)
    )
    blocks, row, stem = 4, 6 * 16 * 8, 3 * 3 * 32 * 8
    assert once == stem + blocks * 2 * row
    assert again == once + blocks * row * (2 if recompute == "block" else 1)


def test_in_processes() -> None:
    expect(examined("unet", "2", "height", processes=True))
