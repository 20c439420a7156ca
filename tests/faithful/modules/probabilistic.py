"""Diffusion, variational and other models that draw random numbers.

Draws that a module returns are given to the original, so that both see the same numbers; of draws that nobody sees
only what all ranks agree on can be told.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats, ints

B, D = 4, 8


def batch():
    return call(floats(B, D))


@case(lambda: call(floats(B, D), ints(8, B), floats(B, D)))
class NoisePrediction(nn.Module):
    """Diffusion with noise and times from the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.a, self.b = nn.Embedding(8, D), nn.Linear(D, 16), nn.Linear(16, D)
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.2, 8), 0))

    def forward(self, x, t, noise):
        alpha = self.alphas[t].unsqueeze(-1)
        noisy = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        return F.mse_loss(self.b(F.silu(self.a(noisy + self.time(t)))), noise)


@case(lambda: call(floats(B, 4, D), floats(B, D), torch.rand(B)))
class ConditionedFlow(nn.Module):
    """Flow matching with adaptive norms and sinusoidal times."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.modulate = nn.LayerNorm(D, elementwise_affine=False), nn.Linear(D, 3 * D)
        self.mlp = nn.Sequential(nn.Linear(D, 16), nn.GELU(approximate="tanh"), nn.Linear(16, D))

    def forward(self, x, c, t):
        frequencies = torch.exp(-torch.arange(D // 2) * 2.0)
        angles = t[:, None] * frequencies
        c = c + torch.cat([angles.cos(), angles.sin()], -1)
        shift, scale, gate = self.modulate(F.silu(c)).unsqueeze(1).chunk(3, dim=-1)
        return (x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)).square().mean()


@case(batch, replay=("noise",))
class VariationalAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x, noise=None):
        mu, logvar = self.encode(x).chunk(2, -1)
        if noise is None:
            noise = torch.randn_like(mu)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(-1).mean()
        return {"loss": F.mse_loss(self.decode(mu + noise * (0.5 * logvar).exp()), x) + kl, "noise": noise}


@case(batch, replay=("noise", "t"))
class DiffusionThatDraws(nn.Module):
    """Times and noise are drawn in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.time = nn.Linear(D, D), nn.Embedding(8, D)

    def forward(self, x, noise=None, t=None):
        noise = torch.randn_like(x) if noise is None else noise
        t = torch.randint(0, 8, (x.shape[0],)) if t is None else t
        return {"loss": F.mse_loss(self.net(x + noise + self.time(t)), noise), "noise": noise, "t": t}


@case(batch, replay=("keep",))
class DropoutMask(nn.Module):
    """A mask by F.dropout of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 16), nn.Linear(16, D)

    def forward(self, x, keep=None):
        h = self.a(x)
        if keep is None:
            keep = F.dropout(torch.ones_like(h), 0.5, self.training)
        return {"loss": self.b(h * keep).square().mean(), "keep": keep}


@case(lambda: call(floats(B, 4, D)), replay=("noise",))
class MaskedAutoencoder(nn.Module):
    """ViT-MAE: a random half of the patches, by argsort of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.mask = nn.Linear(D, D), nn.Linear(D, D), nn.Parameter(torch.zeros(1, 1, D))

    def forward(self, x, noise=None):
        noise = torch.rand(x.shape[0], 4) if noise is None else noise
        order = noise.argsort(1)
        restore = order.argsort(1)
        kept = torch.gather(x, 1, order[:, :2, None].expand(-1, -1, D))
        h = torch.cat([self.encode(kept), self.mask.expand(x.shape[0], 2, -1)], 1)
        h = torch.gather(h, 1, restore[..., None].expand(-1, -1, D))
        return {"loss": F.mse_loss(self.decode(h), x), "noise": noise}


@case(batch, random=True)
class ModuleDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, D))

    def forward(self, x):
        return self.net(x).square().mean()


@case(batch, random=True)
class FunctionalDropout(nn.Module):
    """As nanoGPT and many others call it; the name of another attribute has "drop" in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop_scale = nn.Linear(D, D), 2.0

    def forward(self, x):
        return F.dropout(self.a(x), 0.1, self.training).mul(self.drop_scale).square().mean()


@case(lambda: call(floats(B, 4, D)), random=True)
class AttentionDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0)
        return y.square().mean()


@case(batch, random=True)
class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            keep = x.new_empty(x.shape[0], 1).bernoulli_(0.7).div_(0.7)
            x = x + keep * layer(x).relu()
        return x.square().mean()


@case(batch, random=True)
class GumbelCodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.codes = nn.Linear(D, 4), nn.Parameter(torch.randn(4, D))

    def forward(self, x):
        return F.mse_loss(F.gumbel_softmax(self.a(x), tau=0.7, hard=True) @ self.codes, x)


@case(batch, random=True)
class PolicyGradient(nn.Module):
    """Actions are sampled; the reward comes from them."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Linear(D, 4)

    def forward(self, x):
        log = self.policy(x).log_softmax(-1)
        action = torch.multinomial(log.exp(), 1)
        return -(log.gather(1, action) * (action == 0)).mean()


@case(lambda: call(floats(B, D), floats(B, D)))
class GaussianLikelihood(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, y):
        normal = torch.distributions.Normal(self.mean(x), F.softplus(self.scale(x)) + 1e-3, validate_args=False)
        return -normal.log_prob(y).mean()


@case(lambda: call(floats(B, D), floats(B, D)), refused="make the distribution with validate_args=False")
class ValidatedDistribution(nn.Module):
    """torch checks the arguments (by default until its compiler is imported)."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, y):
        return (
            -torch.distributions.Normal(self.mean(x), F.softplus(self.scale(x)) + 1e-3, validate_args=True)
            .log_prob(y)
            .mean()
        )


@case(batch)
class CouplingFlow(nn.Module):
    """RealNVP: halves transform each other; the loss has the log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Linear(D // 2, D) for _ in range(2))

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        total = 0.0
        for net in self.nets:
            s, t = net(a).chunk(2, dim=1)
            s = torch.tanh(s)
            a, b, total = b * s.exp() + t, a, total + s.sum(1)
        z = torch.cat([a, b], 1)
        return (0.5 * z.square().sum(1) - total).mean()
