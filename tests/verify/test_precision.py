"""What runs in a wider dtype than it was written for: code that stays whole has its casts widened, as a graph has."""

import pytest
import torch
from torch import nn

from tapas.planner.request import Request
from tapas.verify.precision import WiderCasts
from tapas.verify.verification import verify_model

CASTS = (
    lambda x: x.float(), lambda x: x.to(torch.float32), lambda x: x.half(), lambda x: x.bfloat16(),
    lambda x: x.type(torch.float16), lambda x: x.to(dtype=torch.float32, copy=True), lambda x: x.float().half(),
    lambda x: torch.zeros_like(x, dtype=torch.float32), lambda x: x.new_ones(2, dtype=torch.float16),
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASTS)))
def test_casts_are_widened(number: int) -> None:
    x = torch.ones(2, dtype=torch.float64)
    with WiderCasts("float64"):
        assert CASTS[number](x).dtype == torch.float64
        assert x.long().dtype == x.to(torch.int64).dtype == torch.int64
    with WiderCasts("float32"):
        assert CASTS[number](x.float()).dtype == torch.float32
    assert CASTS[number](x).dtype != torch.float64


class Casting(nn.Module):
    """Code that stays whole and says float32 where it means the model's own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.product(x)
        if h.sum() > 1e9:
            h = h * 2
        else:
            weight = h.detach().square().float()
            weight[torch.tensor([0, 2])] = h[1].detach()  # which takes no other dtype
            h = h * weight
        return h.square().mean()


def test_code_that_stays_whole_is_verified_though_it_casts() -> None:
    report = verify_model(Casting(), (torch.randn(6, 8),), Request.of("2"), in_process=True, steps=1)
    assert report.ok, report.checks
