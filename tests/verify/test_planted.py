"""Planted faults are caught if they change a result by more than rounding, and the first wrong operator is named."""

from typing import Any

import pytest
import torch
from torch import nn

from tapas._torch import in_backward
from tapas.api import verify
from tapas.runtime import block, redistribute
from tapas.verify import threads
from tapas.verify.verification import Report
from tests.distributed.small import EAGER


class Net(nn.Module):
    """A column and a row split, a buffer that is written to, and two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.up(x).relu()
        out = self.down(hidden)
        self.mean.mul_(0.9).add_(0.1 * out.detach().mean(0))
        return {"loss": (out - self.mean).square().mean(), "penalty": self.other(hidden).sin().mean()}


def report_of(pin: str = "megatron") -> Report:
    torch.manual_seed(0)
    pins = {"*": pin}
    return verify(Net(), (torch.randn(4, 8),), mesh="2", cluster=EAGER, pins=pins, in_process=True, steps=2)


def wrong(report: Report) -> set[str]:
    return {check.what for check in report.checks if not check.ok}


def test_nothing_is_wrong_without_a_fault() -> None:
    report = report_of()
    assert report.ok and {"buffers after all steps", "gradients through all outputs"} <= {c.what for c in report.checks}


def test_a_dropped_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.ThreadAxis, "all_reduce", lambda self, x, how="sum": x.detach().clone())
    report = report_of()
    assert "outputs" in wrong(report)
    assert report.culprit is not None and report.culprit.phase == "forward"


def test_a_dropped_adjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = threads.ThreadAxis.all_reduce

    def all_reduce(self: threads.ThreadAxis, x: torch.Tensor, how: str = "sum") -> torch.Tensor:
        return x.detach().clone() if in_backward() else plain(self, x, how)

    monkeypatch.setattr(threads.ThreadAxis, "all_reduce", all_reduce)
    report = report_of("ddp")
    assert "gradients" in wrong(report) and "outputs" not in wrong(report)
    assert report.culprit is not None and report.culprit.phase == "backward"


def test_a_dropped_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "written", lambda graph, outputs: {})
    report = report_of()
    assert "buffers after all steps" in wrong(report)
    assert report.culprit is not None and report.culprit.phase == "write to mean"


def test_a_dropped_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(self: Any, output: Any) -> Any:
        return self.moved(self.block.exports[output.export], output.route, output.priced)

    monkeypatch.setattr(block._BlockWriter, "left", left)
    report = report_of()
    assert wrong(report) == {"gradients through all outputs"}
    assert report.culprit is not None and report.culprit.phase == "backward"


def test_a_part_in_the_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = redistribute.Conversion.__call__
    monkeypatch.setattr(
        redistribute.Conversion, "__call__", lambda self, x, rank, phase: plain(self, x, rank, phase).roll(1)
    )
    assert not report_of().ok
