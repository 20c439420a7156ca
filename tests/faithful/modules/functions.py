"""Custom autograd functions, vmap, gradients in forward, checkpoints, autocast."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.faithful.case import call, case, floats

B, D = 4, 8


def batch():
    return call(floats(B, D))


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


@case(batch)
class StraightThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.b(_Round.apply(self.a(x) * 4) / 4).square().mean()


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.scale * grad, None


@case(lambda: call(floats(B, D), torch.tensor([0, 1, 0, 1])))
class GradientReversal(nn.Module):
    """Domain-adversarial training."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.domain = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x, domain):
        h = self.features(x).relu()
        return h.square().mean() + F.cross_entropy(self.domain(_Reverse.apply(h, 0.5)), domain)


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y


@case(batch)
class FunctionThatSaves(nn.Module):
    """Its backward is autograd's: it might as well be split."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x):
        return _Exp.apply(self.a(x)).mean()


class _ClippedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, low, high):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.01, 0.01), None, None


@case(batch)
class ClippedGradient(nn.Module):
    """What it does to a gradient is not linear: partial sums would be clipped one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.b(_ClippedGradient.apply(self.a(x), -1, 1)).square().sum()


@case(batch, refused="vmap")
class VmappedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, D, D))

    def forward(self, x):
        return torch.vmap(lambda w: torch.tanh(x @ w))(self.w).square().mean()


@case(batch, refused="takes a gradient")
class EnergyForces(nn.Module):
    """Forces are gradients of an energy, and are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 16), nn.Linear(16, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.b(torch.tanh(self.a(x))).sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy.square() + forces.square().mean()


@case(batch, refused="takes a gradient")
class InnerGradient(nn.Module):
    """A gradient inside that is not differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(torch.tanh(y).sum(), y)
        return self.a(x + 0.1 * g.sign()).square().mean()


@case(batch, refused="takes a gradient")
class FunctionalGradient(nn.Module):
    """torch.func.grad of a function without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x):
        slope = torch.func.grad(lambda t: torch.sin(t).sum())(x)
        return self.a(slope).square().mean()


@case(batch)
class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


@case(batch)
class CheckpointedTheOldWay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, 16), nn.Linear(16, D), nn.Linear(D, D)

    def forward(self, x):
        x = self.c(x)
        return checkpoint(lambda h: self.b(self.a(h).tanh()), x, use_reentrant=True).square().mean()


@case(batch)
class CheckpointInACheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def inner(self, x):
        y = self.a(x)
        y += 1
        return checkpoint(torch.relu, y, use_reentrant=False)

    def forward(self, x):
        return self.b(checkpoint(self.inner, x, use_reentrant=False)).square().mean()


@case(batch, refused="writes inside of torch.utils.checkpoint")
class CheckpointedNorm(nn.Module):
    """Its statistics are written twice in every step, which its author has hardly meant."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D, track_running_stats=True)
        self.norm.num_batches_tracked = None

    def forward(self, x):
        return checkpoint(self.norm, self.a(x), use_reentrant=False).square().mean()


@case(batch, refused="writes inside of torch.utils.checkpoint")
class CheckpointedLayersThatCount(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


class _Layers(nn.Module):
    """Four layers that are captured as one: what comes after them is given stand-ins."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4)))
        self.register_buffer("last", torch.zeros(B, D))


@case(batch)
class FunctionOfLayers(_Layers):
    def forward(self, x):
        return _Round.apply(self.layers(x) * 1.0).square().mean() + _Round.apply(self.layers(x)).mean()


@case(batch)
class BufferSetToLayers(_Layers):
    def forward(self, x):
        before = self.last * 0.5
        self.last = self.layers(x).detach()
        return (self.layers(x) + before).square().mean()


@case(batch, refused="sets a hook on a tensor")
class HookOnLayers(_Layers):
    def forward(self, x):
        h = self.layers(x)
        h.register_hook(lambda grad: grad * 0.5)
        return h.square().mean()


@case(batch)
class VmapWithoutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x):
        with torch.no_grad():
            x = torch.vmap(torch.sin)(x)
        return self.a(x).square().mean()


@case(batch, refused="sets a hook on a tensor")
class TensorHook(nn.Module):
    """A hook on an activation scales its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.5)
        return self.b(h).square().mean()


def _thousands():
    return call(torch.randint(-2, 3, (B, D)).float() / 4)


class _Exact(nn.Module):
    """Weights and inputs that bfloat16 represents, and a part that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        with torch.no_grad():
            for layer in (self.a, self.b):
                layer.weight.copy_(torch.randint(-2, 3, (D, D)) / 4)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@case(_thousands, dtype=torch.float32, tolerance=3e-2)
class AutocastInside(_Exact):
    """Half precision but for what is taken out of it."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x)
            with torch.autocast("cpu", enabled=False):
                y = self.b(h.float() + 1001.0) - 1000 * self.b.weight.float().sum(1)
        return y.float().square().mean()


@case(_thousands, dtype=torch.float32, tolerance=3e-2, around=autocast)
class AutocastOutside(_Exact):
    """The training loop says autocast; a part of the module says no."""

    def forward(self, x):
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            y = self.b(h.float() + 1001.0) - 1000 * self.b.weight.float().sum(1)
        return y.square().mean()


@case(batch)
class NoGradBranch(nn.Module):
    """A weight that is also used where no gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        with torch.no_grad():
            target = self.b(self.a(x)).softmax(-1)
        return F.mse_loss(self.a(x), target) + self.b(x.detach()).square().mean() * 0.1


@case(batch)
class NoGradOnly(nn.Module):
    """A weight that is used nowhere else: it has no gradient, not even zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        with torch.no_grad():
            shift = self.a(x)
        return self.b(x + shift).square().mean()


@case(batch, refused="higher-order operator cond")
class TorchCond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x):
        y = self.a(x)
        return torch.cond(y.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (y,)).square().mean()


@case(batch)
class BranchOnData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x):
        y = self.a(x)
        if y.sum() > 0:
            y = y * 2
        return y.square().mean()


@case(batch)
class ScriptedPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.f = nn.Linear(D, D), _silu

    def forward(self, x):
        return self.f(self.a(x)).square().mean()


def _silu(x):
    return x * torch.sigmoid(x)
