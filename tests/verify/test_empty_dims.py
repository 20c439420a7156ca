"""Tensors with a dim of size 0: they are whole, and everything around them is planned, run and right all the same."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tapas
from tapas.planner.fit import search
from tapas.planner.pipeline import pose
from tapas.planner.request import Request
from tapas.verify.subject import capture_subject
from tests.distributed.small import EAGER
from tests.verify.solved import examine_solution
from tests.verify.test_verify import expect, random_plan


class Around(nn.Module):
    """Some work, and a function of what it gives and of a parameter without elements."""

    def __init__(self, ending: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.nothing = nn.Parameter(torch.zeros(0, 8))
        self.ending = ending

    def forward(self, x: Tensor) -> Tensor:
        return self.ending(self.out(self.into(x).relu()), self.nothing).square().sum()


def empty_slice(y: Tensor, nothing: Tensor) -> Tensor:
    return torch.cat([y[..., 4:2], y], -1)


def empty_parameter(y: Tensor, nothing: Tensor) -> Tensor:
    return torch.cat([y, nothing])


def product_over_nothing(y: Tensor, nothing: Tensor) -> Tensor:
    return y + F.linear(y[..., :0], nothing.t())


def empty_section(y: Tensor, nothing: Tensor) -> Tensor:
    none, some, rest = y.split([0, 4, 4], -1)
    return torch.cat([some * rest, none.exp()], -1)


def empty_past(y: Tensor, nothing: Tensor) -> Tensor:
    """As a cache of keys that nothing was put into yet."""
    heads = y.view(-1, 1, 2, 4).transpose(1, 2)
    keys = torch.cat([heads.new_zeros(heads.shape[0], 2, 0, 4), heads], 2)
    return F.scaled_dot_product_attention(heads, keys, keys)


def statistics_of_nothing(y: Tensor, nothing: Tensor) -> Tensor:
    rows = y[:, 3:3]
    return y + rows.softmax(-1).sum() + F.layer_norm(nothing, (8,)).sum() + rows.view(0, 4).relu().sum()


ENDINGS = (empty_slice, empty_parameter, product_over_nothing, empty_section, empty_past, statistics_of_nothing)


@pytest.mark.parametrize("mesh", ["2", "2x2"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_best_and_odd_plans_are_the_original(ending: Callable[[Tensor, Tensor], Tensor], mesh: str) -> None:
    torch.manual_seed(0)
    found = capture_subject(Around(ending), {"x": torch.randn(4, 8)})
    problem = pose(found.graph, Request.of(mesh, EAGER))[0]
    for solution in (search(problem), random_plan(problem, 1), random_plan(problem, 2)):
        expect(examine_solution(found, solution, in_process=True, steps=1))


def test_a_batch_of_nothing() -> None:
    report = tapas.verify(Around(empty_slice), {"x": torch.randn(0, 8)}, mesh="2", in_process=True)
    expect(report)
    with pytest.raises(tapas.TapasError, match="a batch of 0 does not split over 2 devices"):
        tapas.plan(Around(empty_slice), {"x": torch.randn(0, 8)}, mesh="2", pins={"*": "ddp"})
