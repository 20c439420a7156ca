"""Quantised weights, fake quantisation, low-rank adapters and other ways of tuning."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats, ints
from tests.quantised import Int4Linear, Int4Written, Int8Linear, PackedLinear

B, D = 4, 8


def batch():
    return call(floats(B, D))


@case(batch)
class IntegerWeights(nn.Module):
    """Weights in int8 with scales, a trained head above."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("q", ints(255, 16, D).sub(127).to(torch.int8))
        self.register_buffer("scale", torch.rand(16, 1) / 64)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(F.linear(x, self.q.to(x.dtype) * self.scale).relu()).square().mean()


@case(batch)
class PackedNibbles(nn.Module):
    """Two weights in a byte, unpacked by shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", ints(256, D, D // 2).to(torch.uint8))
        self.head = nn.Linear(D, 4)

    def forward(self, x):
        low, high = self.packed & 15, self.packed >> 4
        w = torch.stack([low, high], -1).flatten(1).to(x.dtype).sub(8).div(16)
        return self.head(x @ w.t()).square().mean()


WIDE = 64  # so large that weights are told from tables


class _QuantisedLayers(nn.Module):
    """A frozen stack with adapters beside its quantised layers."""

    kind: type[nn.Module] = Int8Linear

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(self.kind(WIDE, 2 * WIDE) for _ in range(2))
        self.down = nn.ModuleList(self.kind(2 * WIDE, WIDE) for _ in range(2))
        self.a = nn.Parameter(torch.randn(2, WIDE) * 0.1)
        self.b = nn.Parameter(torch.randn(2 * WIDE, 2) * 0.1)

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down((up(x) + x @ self.a.t() @ self.b.t()).relu()) / WIDE
        return x.square().mean()


def wide():
    return call(floats(B, WIDE))


def _other_weights(module: nn.Module, step: int) -> None:
    """A user loads others, or sets one."""
    if step == 1:
        module.load_state_dict({name: t.flip(0) for name, t in module.state_dict().items()})
    if step == 2:
        module.up[0].q = torch.ones_like(module.up[1].q)


@case(wide, before=_other_weights)
class Int8Layers(_QuantisedLayers):
    pass


@case(wide)
class Int4Layers(_QuantisedLayers):
    kind = Int4Linear


@case(wide, train=False)
class WrittenInt4Layers(_QuantisedLayers):
    kind = Int4Written


@case(wide)
class PackedLayers(_QuantisedLayers):
    kind = PackedLinear


@case(batch)
class FakeQuantised(nn.Module):
    """Straight-through by detach, with a scale from the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 16), nn.Linear(16, D)

    def quantise(self, w):
        scale = w.detach().abs().amax(1, keepdim=True) / 7
        return w + ((w / scale).round().clamp(-8, 7) * scale - w).detach()

    def forward(self, x):
        h = F.linear(x, self.quantise(self.a.weight), self.a.bias).relu()
        return F.linear(h, self.quantise(self.b.weight)).square().mean()


@case(batch)
class TernaryBits(nn.Module):
    """BitLinear: a norm, quantised activations, ternary weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.w = nn.RMSNorm(D), nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        x = self.norm(x)
        step = 127 / x.detach().abs().max(-1, keepdim=True).values.clamp(min=1e-5)
        x = x + ((x * step).round() / step - x).detach()
        scale = 1 / self.w.detach().abs().mean().clamp(min=1e-5)
        w = self.w + ((self.w * scale).round().clamp(-1, 1) / scale - self.w).detach()
        return F.linear(x, w).square().mean()


@case(batch)
class ObservedRange(nn.Module):
    """An observer keeps the extremes it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))

    def forward(self, x):
        h = self.a(x)
        self.low.copy_(torch.minimum(self.low, h.detach().min()))
        self.high.copy_(torch.maximum(self.high, h.detach().max()))
        scale = (self.high - self.low) / 255
        return (h + ((h / scale).round() * scale - h).detach()).square().mean()


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.lora_b = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)
        self.scaling = 2.0

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.t() @ self.lora_b.t() * self.scaling


@case(batch)
class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = LoraLinear(nn.Linear(D, 16)), LoraLinear(nn.Linear(16, D))

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()


def _unfreeze(module: nn.Module, step: int) -> None:
    if step == 1:
        for parameter in module.parameters():
            parameter.requires_grad_(True)


@case(batch, before=_unfreeze, refused="was frozen when the plan was made")
class UnfrozenLora(Lora):
    """The second step trains the base as well."""


def _freeze(module: nn.Module, step: int) -> None:
    if step == 1:
        module.get_parameter("a.weight").requires_grad_(False)


@case(batch, before=_freeze)
class FrozenLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.b(self.a(x).relu()).square().mean()


@case(lambda: call(ints(16, B, 4)))
class PromptTuning(nn.Module):
    """Learned vectors in front of a frozen model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.net, self.prompt = nn.Embedding(16, D), nn.Linear(D, D), nn.Parameter(torch.randn(2, D))
        self.embed.requires_grad_(False)
        self.net.requires_grad_(False)

    def forward(self, ids):
        x = torch.cat([self.prompt.unsqueeze(0).repeat(ids.size(0), 1, 1), self.embed(ids)], 1)
        return (x + torch.softmax(x @ x.mT, -1) @ self.net(x)).square().mean()


@case(batch)
class Adapters(nn.Module):
    """Bottlenecks in a frozen stack."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4)).requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Sequential(nn.Linear(D, 2), nn.GELU(), nn.Linear(2, D)) for _ in range(4))

    def forward(self, x):
        for layer, adapter in zip(self.layers, self.adapters, strict=True):
            x = x + adapter(F.silu(layer(x)))
        return x.square().mean()


@case(batch)
class DoraLinear(nn.Module):
    """The norm of a column and its direction apart."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.randn(D, D))
        self.a, self.b = nn.Parameter(torch.randn(2, D)), nn.Parameter(torch.randn(D, 2))
        self.magnitude = nn.Parameter(self.w.norm(dim=1))

    def forward(self, x):
        w = self.w + self.b @ self.a
        return F.linear(x, self.magnitude.unsqueeze(1) * w / w.norm(dim=1, keepdim=True).detach()).square().mean()
