"""Which dims are the batch, found out from inputs and from what attends to what."""

import pytest
import torch
from torch import Tensor, nn

import tapas.rules  # noqa: F401 - registers the rules
from tapas.capture import capture
from tapas.rules.base import Call, rule_for
from tapas.rules.dim_roles import DimRoles


class Model(nn.Module):
    def __init__(self, batch_first: bool, weights: bool) -> None:
        super().__init__()
        self.inner, self.weights = nn.MultiheadAttention(8, 4, batch_first=batch_first), weights

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=self.weights)[0].flatten(0, 1).square().mean()


@pytest.mark.parametrize("weights", (False, True))
@pytest.mark.parametrize("batch_first", (False, True))
def test_the_batch_is_the_dim_that_nothing_attends_over(batch_first: bool, weights: bool) -> None:
    graph = capture(Model(batch_first, weights), (torch.zeros(3, 5, 8),))
    calls = [(op, rule_for(Call.of(op, graph.tensors))) for op in graph.ops]
    roles = DimRoles(calls, [(("x", 0), "batch")])
    batch, other = (0, 1) if batch_first else (1, 0)
    assert (roles.of_dim("x", batch), roles.of_dim("x", other)) == ("batch", "")
    flat, rule = next((op, rule) for op, rule in calls if graph.tensors[op.results[0]].shape == (15, 8))
    assert {factor.name: roles.of(flat, factor) for factor in rule.factors} == {
        "f0": "batch" if batch_first else "",
        "f1": "",  # a minor part is nothing that one could ask to split
        "f2": "",
    }
