"""Weights that are buffers: other tools split parameters."""

import pytest
import torch
from torch import nn

import tapas
from tapas.export.exported import CannotSay
from tests.distributed.small import EAGER
from tests.quantised import Int8Linear


@pytest.mark.parametrize("to", ["torch", "transformers"])
def test_buffers_in_pieces_cannot_be_said(to: str) -> None:
    model, inputs = nn.Sequential(Int8Linear(64, 128), nn.ReLU(), Int8Linear(128, 64)), (torch.randn(4, 64),)
    plan = tapas.plan(model, inputs, mesh=(2,), cluster=EAGER, pins={"*": "fsdp"}, baselines=False)
    with pytest.raises(CannotSay, match=r"q: is stored in pieces, and is a buffer, which stays whole"):
        tapas.export(plan, to, model, inputs)
    tapas.export(plan, to, model, inputs, approximate=True)
