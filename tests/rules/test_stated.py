"""Rules that authors state for operators of their own."""

import pytest
import torch
from torch import nn

import tapas
from tapas.errors import TapasError


def operator(name: str, compute, gradient) -> None:
    @torch.library.custom_op(f"tapas_stated::{name}", mutates_args=())
    def made(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return compute(x, w)

    made.register_fake(lambda x, w: compute(x, w))
    made.register_autograd(lambda ctx, g: gradient(g, *ctx.saved_tensors), setup_context=_kept)


def _kept(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


for _name in ("scaled", "unstated", "wrong"):
    operator(_name, lambda x, w: x * w, lambda g, x, w: (g * w, (g * x).flatten(0, -2).sum(0)))
operator("normed", lambda x, w: x / x.norm(dim=-1, keepdim=True) * w, lambda g, x, w: (g, torch.zeros_like(w)))


class Layers(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.scale = nn.Parameter(torch.randn(32))
        self.operator = getattr(torch.ops.tapas_stated, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.operator(self.up(x), self.scale)).square().mean()


def planned(name: str) -> tuple[nn.Module, tuple[torch.Tensor], tapas.Plan]:
    torch.manual_seed(0)
    model, inputs = Layers(name), (torch.randn(4, 6, 8),)
    return model, inputs, tapas.plan(model, inputs, mesh=2, pins={"*": "megatron"}, memory=None)


def test_an_operator_is_split_as_stated() -> None:
    tapas.rule("tapas_stated::scaled", "b s d, d -> b s d")
    model, inputs, plan = planned("scaled")
    assert not any("no rule" in warning for warning in plan.warnings)
    assert any("tried out" in warning for warning in planned("unstated")[2].warnings)
    assert tapas.verify(model, inputs, plan=plan, in_process=True, steps=2).ok


def test_a_wrong_rule_does_not_pass_verification() -> None:
    tapas.rule("tapas_stated::normed", "b s d, d -> b s d")  # the norm is one of all of d
    model, inputs, plan = planned("normed")
    assert not tapas.verify(model, inputs, plan=plan, in_process=True, steps=1).ok


def test_it_may_be_stated_twice_but_not_in_two_ways() -> None:
    for _ in range(2):
        assert tapas.rule("tapas_stated::wrong", "b s d, d -> b s d")(len) is len
    with pytest.raises(TapasError, match="another rule"):
        tapas.rule("tapas_stated::wrong", "b s d, _ -> b s d")
    with pytest.raises(TapasError, match="another rule"):
        tapas.rule("aten::linear", "a b, c b -> a c")
    with pytest.raises(TapasError, match="no factors"):
        tapas.rule("mine", "a b")
