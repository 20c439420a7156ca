"""What cannot be captured is refused by place, fact and remedy, and not blamed on the inputs."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli
from torch.testing._internal.two_tensor import TwoTensor

from tapas.capture import capture
from tapas.errors import CaptureError


class Forward(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.a, x).square().sum()


def vmapped(a: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: a(row))(x)


def functional_gradient(a: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda x: a(x).square().sum())(x)


def inner_gradient(a: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    return torch.autograd.grad(a(x).square().sum(), x, create_graph=True)[0]


def flexible(a: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    q = a(x).view(4, 1, 1, 8).expand(4, 1, 16, 8)
    return flex_attention(q, q, q)


def chosen(a: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: a(y), lambda y: -a(y), (x,))


def masked_by_numpy(a: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return a(x) * torch.tensor(np.random.rand(4, 1), dtype=torch.float32)


def validated(a: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Bernoulli(probs=a(x).sigmoid(), validate_args=True).log_prob((x > 0).float())


@pytest.mark.parametrize(("function", "fact", "remedy"), [
    (functional_gradient, "takes a gradient in forward", "take it outside"),
    (inner_gradient, "takes a gradient in forward", "take it outside"),
    (flexible, "flex_attention", "scaled_dot_product_attention"),
    (chosen, "higher-order operator cond", "torch.where"),
    (masked_by_numpy, "numpy has drawn random numbers", "draw with torch"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # torch warns about some of what it cannot do
def test_the_reason_is_told(function, fact: str, remedy: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Forward(function), (torch.randn(4, 8),))
    assert "test_refusals.py" in caught.value.place
    assert fact in caught.value.fact and remedy in caught.value.remedy
    assert "example inputs" not in caught.value.fact


@pytest.mark.parametrize("function", [vmapped, validated])
@pytest.mark.filterwarnings("ignore")
def test_what_an_export_cannot_follow_stays_whole(function) -> None:
    graph = capture(Forward(function), (torch.randn(4, 8),))
    assert any("test_refusals.py" in note and "stays whole" in note for note in graph.notes)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_submodule_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    with pytest.raises(CaptureError, match=r"torch\.jit") as caught:
        capture(model, (torch.randn(4, 8),))
    assert caught.value.place.startswith("1")


def test_others_may_train_meanwhile() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from tapas.capture.diagnostics import without_inner_gradients

    weight = torch.ones(3, requires_grad=True)
    with without_inner_gradients(), ThreadPoolExecutor(1) as other:
        other.submit(lambda: weight.square().sum().backward()).result()
    assert weight.grad is not None


def test_weights_of_several_tensors() -> None:
    """As libraries for quantisation have them."""
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)))
    with pytest.raises(CaptureError, match=r"^weight: is a TwoTensor, .*unwrap_tensor_subclass"):
        capture(model, (torch.randn(4, 8),))
