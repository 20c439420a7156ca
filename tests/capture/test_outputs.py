"""What a model may return: nests that torch knows, caches of transformers, and nothing that hides its tensors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tapas.capture import capture
from tapas.errors import CaptureError
from tapas.planner.request import Request
from tapas.verify.verification import verify_model


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache()
        for layer in range(2):
            cache.update(self.keys(x).view(4, 2, 3, 4), self.values(x).view(4, 2, 3, 4), layer)
        return {"hidden": x, "cache": cache}


def test_a_cache_is_returned_as_its_tensors() -> None:
    graph = capture(Caching(), (torch.randn(4, 3, 8),), training=False)
    assert [graph.tensors[name].shape for name in graph.returned] == [(4, 3, 8), *[(4, 2, 3, 4)] * 4]
    report = verify_model(Caching(), (torch.randn(4, 3, 8),), Request.of("2"), in_process=True, steps=1)
    assert report.ok, report.checks


class Hiding(Caching):
    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(hidden=self.keys(x))


def test_what_hides_its_tensors_is_refused_by_what_it_is() -> None:
    with pytest.raises(CaptureError, match=r"cannot take apart into tensors: Found <class 'types.SimpleNamespace'>"):
        capture(Hiding(), (torch.randn(4, 3, 8),), training=False)
