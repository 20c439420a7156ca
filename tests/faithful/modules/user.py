"""What users do to a module between steps."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats

B, D = 4, 8


def batch():
    return call(floats(B, D))


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 16), nn.Linear(16, D)
        self.alpha = 1.0

    def forward(self, x):
        return F.mse_loss(self.b(self.a(x).relu()) * self.alpha, x)


def _zero(module: nn.Module, step: int) -> None:
    module.zero_grad()


@case(batch, before=_zero)
class ZeroGrad(_Mlp):
    pass


def _evaluate(module: nn.Module, step: int) -> None:
    module.eval()
    with torch.no_grad():
        module(torch.ones(B, D))
    module.train()


@case(batch, before=_evaluate)
class EvaluatedBetween(nn.Module):
    """Evaluation between steps must not write statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.ReLU(), nn.Linear(D, D))

    def forward(self, x):
        return self.net(x).square().mean()


def _load(module: nn.Module, step: int) -> None:
    if step == 1:
        state = _Mlp().state_dict()  # ranks that are threads share a generator: the numbers must not be drawn
        numbers = {name: torch.arange(t.numel()).reshape(t.shape).add(1).sin() for name, t in state.items()}
        module.load_state_dict({name: n.abs().to(state[name].dtype) for name, n in numbers.items()})


@case(batch, before=_load)
class LoadsPlainTensors(_Mlp):
    pass


def _halved(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _parameter_hook(module: nn.Module, step: int) -> None:
    if step == 0:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(_halved)


@case(batch, before=_parameter_hook)
class HookAfterAccumulation(_Mlp):
    pass


def _gradient_hook(module: nn.Module, step: int) -> None:
    if step == 0:
        module.get_parameter("a.weight").register_hook(lambda grad: grad * 2)


@case(batch, before=_gradient_hook)
class HookOnParameter(_Mlp):
    pass


def _attribute(module: nn.Module, step: int) -> None:
    if step == 1:
        module.alpha = 2.0  # type: ignore[assignment]


@case(batch, before=_attribute, refused="alpha")
class AttributeSetLater(_Mlp):
    """The program has the old value in it."""


def _copied(module: nn.Module, step: int) -> None:
    if step == 1:
        twin = copy.deepcopy(module)
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(0)


@case(batch, before=_copied)
class DeepCopied(_Mlp):
    """What is done to the copy is done to the copy only."""


def _scaled(module: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9)


@case(batch, before=_scaled)
class WrittenByHand(_Mlp):
    """Weight decay by the user."""


def _buffer(module: nn.Module, step: int) -> None:
    if step == 1:
        module.get_buffer("scale").fill_(2.0)


@case(batch, before=_buffer)
class BufferSetLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return (self.a(x) * self.scale).square().mean()


@case(batch)
class EvaluationMode(nn.Module):
    """Trained in evaluation mode: no dropout, running statistics as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Dropout(0.5), nn.Linear(D, D))
        self.eval()

    def forward(self, x):
        return self.net(x).square().mean()


@case(batch)
class PartlyInEvaluationMode(nn.Module):
    """Frozen statistics in a module that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.live = nn.Linear(D, D), nn.BatchNorm1d(D), nn.BatchNorm1d(D)
        self.norm.eval()

    def forward(self, x):
        return self.live(self.norm(self.a(x))).pow(3).mean()


def _indexed(module: nn.Module, step: int) -> None:
    assert module.net[0].weight.shape == (16, D)  # type: ignore[index]
    assert len(module.net) == 3  # type: ignore[arg-type]
    assert "Linear" in repr(module) or "weight" in repr(module)


@case(batch, before=_indexed)
class IndexedSequential(nn.Module):
    """Submodules are reached as in the original."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, D))

    def forward(self, x):
        return self.net(x).square().mean()
