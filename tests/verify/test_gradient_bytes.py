"""Where no gradient flows, none is counted: the bytes that are predicted are those that are sent."""

import pytest
import torch
from torch import Tensor, nn

import tapas

D = 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)


class SharedNorm(Model):
    """The norm's second result is for the log."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.norm(self.a(x))
        return {"loss": h.square().mean(), "seen": self.norm(self.b(x)).detach()}


class WithoutGradient(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            scale = self.a(x.flip(0)).abs().mean()
        return (self.b(h) / scale).square().mean()


class Detached(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return (self.b(h) * h.detach().softmax(-1) + nn.functional.linear(x, self.a.weight.detach())).square().mean()


class Chosen(Model):
    """An argmax takes no gradient, of the weight nor of the activation."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.a(x))
        best = (h @ self.b.weight.t()).argmax(-1)
        return self.b(h).gather(-1, best[:, None]).square().mean(), best


class Branch(Model):
    """What is returned besides has a gradient of its own, which nobody takes."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.norm(self.a(x))
        return {"loss": h.square().mean(), "hidden": self.b(h).relu(), "total": self.norm(self.b(h)).sum()}


MODELS = (SharedNorm, WithoutGradient, Detached, Chosen, Branch)


@pytest.mark.parametrize("mesh", ["2", "2x2"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "megatron"])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_no_more_is_predicted_than_sent(make: type[Model], strategy: str, mesh: str) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(4, D),)
    report = tapas.verify(make(), inputs, mesh=mesh, pins={"*": strategy}, memory=None, in_process=True, steps=1)
    for sent in report.sent["float64"]:
        assert sent.predicted_nbytes == sent.executed_nbytes, sent


def test_a_gradient_that_nobody_plans_for_costs_nothing() -> None:
    """Outputs besides the loss do not change its plan; to name one prices it."""
    inputs = (torch.randn(4, D),)
    options = {"mesh": "2", "pins": {"*": "ddp"}, "memory": None, "baselines": False}
    plain, both = (tapas.plan(Branch(), inputs, **options, losses=names) for names in ((), ("loss", "total")))
    assert both.seconds["backward"] > plain.seconds["backward"]
    assert both.seconds["forward"] == plain.seconds["forward"]
