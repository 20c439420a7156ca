"""What is said where a process runs alone."""

import pytest
import torch
from torch import nn

import tapas
from tapas.errors import TapasError


def test_a_script_that_torchrun_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(TapasError, match="torchrun --nproc-per-node 4") as caught:
        tapas.parallelize(nn.Linear(8, 8), (torch.zeros(4, 8),), mesh="2x2")
    assert caught.value.place == "mesh 2x2"
