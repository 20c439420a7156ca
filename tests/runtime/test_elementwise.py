"""Which optimizers update every element by itself: found by trying them, here held against what is known of them."""

from typing import Any

import pytest
import torch
from torch import nn

from tapas.runtime.elementwise import try_out

ELEMENTWISE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True, "maximize": True},
    "Adamax": {"weight_decay": 0.1},
    "Adadelta": {"foreach": True},
    "Adagrad": {"lr_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "NAdam": {"foreach": True},
    "RAdam": {},
    "ASGD": {"t0": 2},
}
OTHERS: dict[str, dict[str, Any]] = {"Adafactor": {}, "LBFGS": {}, "Muon": {}}
SCALARS = {"step", "mu_product", "mu", "eta"}


@pytest.mark.parametrize("dims", [1, 2, 4])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str, dims: int) -> None:
    kind = getattr(torch.optim, name)
    seen = try_out(lambda p: kind([p], **ELEMENTWISE[name]), dims, torch.device("cpu"))
    assert seen.objection == ""
    parameter = nn.Parameter(torch.randn(7))
    optimizer = kind([parameter], **ELEMENTWISE[name])
    for _ in range(2):
        parameter.grad = torch.randn(7)
        optimizer.step()
    assert seen.elementwise_state == optimizer.state[parameter].keys() - SCALARS


@pytest.mark.parametrize("name", OTHERS)
def test_not_elementwise(name: str) -> None:
    kind = getattr(torch.optim, name)
    assert "cut along dim" in try_out(lambda p: kind([p], **OTHERS[name]), 2, torch.device("cpu")).objection


def test_all_of_torch_are_looked_at() -> None:
    """`SparseAdam` takes sparse gradients only, which parallel modules do not make."""
    all_of_them = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    assert all_of_them - {"Optimizer", "SparseAdam"} == ELEMENTWISE.keys() | OTHERS.keys()


class _Own(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.change(p, p.grad, self.state[p]), alpha=group["lr"])


class Signs(_Own):
    """As in Lion."""

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        before = state.setdefault("average", torch.zeros_like(parameter))
        state["average"] = before * 0.9 + gradient * 0.1
        return state["average"].sign()


class Rows(_Own):
    """Independent of how rows are dealt out, but not of how they are cut."""

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return gradient / gradient.norm(dim=-1, keepdim=True)


class ClipsLarge(_Own):
    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return gradient * (10 / gradient.norm()).clamp(max=1)


class RemembersTheNorm(_Own):
    """And may act upon it some day."""

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["norm"] = gradient.norm()
        return gradient


class Draws(_Own):
    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return gradient + torch.randn_like(gradient)


class Breaks(_Own):
    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        raise ValueError("needs a supercomputer")


@pytest.mark.parametrize(
    ("kind", "objection"),
    [(Signs, ""), (Rows, "cut along dim 1"), (ClipsLarge, "cut along dim 0"), (RemembersTheNorm, "its norm"),
     (Draws, "cut along dim 0"), (Breaks, "needs a supercomputer")],
)  # fmt: skip
def test_optimizers_of_users(kind: Any, objection: str) -> None:
    before = torch.random.get_rng_state()
    seen = try_out(lambda p: kind([p]), 2, torch.device("cpu"))
    assert objection in seen.objection and bool(objection) == bool(seen.objection)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert seen.elementwise_state == ({"average"} if kind is Signs else frozenset())
