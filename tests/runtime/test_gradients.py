"""Gradients that are not sent reach their parameters without a word of ours for each of them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tapas
from tapas._torch import accumulation_hooks, local_part
from tapas.runtime.module import executor_of
from tests.distributed.small import EAGER
from tests.faithful.ranks import thread_groups


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.second(torch.tanh(self.first(x)))
        return {"y": y, "loss": y.square().mean()}


def on_one_rank(work: Any) -> Any:
    torch.manual_seed(0)
    model, x = Small(), torch.randn(8, 4)

    def on_rank(device_mesh: DeviceMesh) -> Any:
        ours: Any = tapas.parallelize(model, (x,), mesh=device_mesh, cluster=EAGER, memory=None)
        return work(model, ours, x)

    with thread_groups() as ranks:
        (result,) = ranks((1,))(on_rank)
    return result


def same_gradients(model: nn.Module, ours: nn.Module) -> bool:
    pairs = zip(model.parameters(), ours.parameters(), strict=True)
    return all(torch.allclose(a.grad, b.grad.full_tensor()) for a, b in pairs)  # type: ignore[arg-type, union-attr]


def test_autograd_takes_care_of_what_is_not_sent() -> None:
    def work(model: Small, ours: Any, x: torch.Tensor) -> tuple[bool, int]:
        for one in (model, ours):
            for _ in range(2):
                one(x)["loss"].backward()
            first, second = one(x), one(2 * x)
            (first["loss"] + second["y"].sum()).backward()
        ((_, gradients),) = executor_of(ours).programs
        return same_gradients(model, ours), sum(len(accumulation_hooks(leaf)) for _, leaf in gradients.leaves.values())

    assert on_one_rank(work) == (True, 0)


def test_a_parameter_that_gets_other_memory_before_the_backward_pass() -> None:
    """Autograd knows the one that the forward pass has read, and the one of the next forward pass."""

    def work(model: Small, ours: Any, x: torch.Tensor) -> bool:
        model(x)["loss"].backward()
        model(x)["loss"].backward()
        before = ours(x)["loss"]
        for parameter in ours.parameters():
            local_part(parameter).data = local_part(parameter).clone()
        (before + ours(x)["loss"]).backward()
        return same_gradients(model, ours)

    assert on_one_rank(work)


def test_a_backward_pass_that_fails_leaves_nothing_behind() -> None:
    def work(model: Small, ours: Any, x: torch.Tensor) -> bool:
        model(x)["loss"].backward()
        loss = ours(x)["loss"]
        with torch.no_grad():
            local_part(ours.second.weight).add_(0)  # what was read of it is not there any more
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        ours(x)["loss"].backward()
        return same_gradients(model, ours)

    assert on_one_rank(work)
