"""Buffers that forward writes."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats, ints

B, D = 4, 8


def batch():
    return call(floats(B, D))


@case(batch)
class CountedCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n += 1
        return self.a(x).square().mean() + self.n


@case(batch)
class CountedInIntegers(nn.Module):
    """The count is read by nobody but the user."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.count.add_(1)
        return self.a(x).square().mean()


@case(batch)
class AssignedCount(nn.Module):
    """The buffer is replaced instead of written."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n = self.n + 1
        return self.a(x).square().mean() * self.n


@case(batch)
class ExponentialAverage(nn.Module):
    """The mean of activations, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.register_buffer("mean", torch.zeros(2 * D))

    def forward(self, x):
        h = self.a(x).relu()
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.b(h - self.mean).square().mean()


@case(batch)
class LerpedNorm(nn.Module):
    """A norm of its own with running statistics, by lerp_ under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(D))
        self.register_buffer("var", torch.ones(D))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        var = x.var(0, unbiased=False)
        with torch.no_grad():
            self.var.lerp_(var, 0.1)
            self.seen += x.size(0)
        return (x / (self.var + 1e-5).sqrt() * self.w).square().mean()


@case(batch)
class CopiedState(nn.Module):
    """The last batch is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.register_buffer("last", torch.zeros(B, D))

    def forward(self, x):
        loss = (self.a(x) - self.last).square().mean()
        self.last.copy_(x)
        return loss


@case(batch)
class MomentumQueue(nn.Module):
    """MoCo: a momentum encoder and a queue of keys, written at a pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(D, 8), nn.Linear(D, 8)
        self.k.load_state_dict(self.q.state_dict())
        self.k.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 16), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        q = F.normalize(self.q(x), dim=1)
        with torch.no_grad():
            k = F.normalize(self.k(x.flip(0)), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.2
        with torch.no_grad():
            place = (self.pointer + torch.arange(B)) % 16
            self.queue.index_copy_(1, place, k.T)
            self.pointer.add_(B).remainder_(16)
        return F.cross_entropy(logits, torch.zeros(B, dtype=torch.long))


@case(batch, refused="writes to this parameter")
class MomentumEncoder(nn.Module):
    """BYOL: parameters of one network follow another's, inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predict, self.target = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
            q.mul_(0.9).add_(p, alpha=0.1)

    def forward(self, x):
        self.follow()
        p, z = self.predict(self.online(x)), self.target(x.flip(1))
        return 2 - 2 * F.cosine_similarity(p, z.detach(), dim=-1).mean()


@case(lambda: call(floats(B, 1, D), torch.tensor([2])), train=False)
class StaticCache(nn.Module):
    """One token of a decoder with its cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.register_buffer("k", torch.zeros(B, 4, D), persistent=False)
        self.register_buffer("v", torch.zeros(B, 4, D), persistent=False)

    def forward(self, x, place):
        q, k, v = self.qkv(x).chunk(3, -1)
        self.k.index_copy_(1, place, k)
        self.v.index_copy_(1, place, v)
        return F.scaled_dot_product_attention(q, self.k, self.v)


@case(lambda: call(floats(B, 1, D)), train=False)
class SlicedCache(nn.Module):
    """The cache is shifted, and written by slices."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Linear(D, 2 * D)
        self.register_buffer("cache", torch.zeros(B, 4, 2 * D))

    def forward(self, x):
        self.cache[:, :-1] = self.cache[:, 1:].clone()
        self.cache[:, -1:] = self.kv(x)
        k, v = self.cache.split(D, -1)
        return torch.softmax(x @ k.transpose(1, 2), -1) @ v


@case(batch)
class VectorQuantiser(nn.Module):
    """VQ-VAE with a codebook that averages what falls to its codes."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(D, 4), nn.Linear(4, D)
        self.register_buffer("codes", torch.randn(8, 4))
        self.register_buffer("size", torch.ones(8))
        self.register_buffer("sums", torch.randn(8, 4))

    def forward(self, x):
        z = self.encode(x)
        distance = (z.unsqueeze(1) - self.codes).square().sum(-1)
        hot = F.one_hot(distance.argmin(1), 8).to(x.dtype)
        if self.training:
            with torch.no_grad():
                self.size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.t() @ z.detach(), alpha=0.1)
        quantised = hot @ self.codes
        if self.training:
            self.codes.copy_(self.sums / self.size.clamp(min=1e-3).unsqueeze(1))
        straight = z + (quantised - z).detach()
        return F.mse_loss(self.decode(straight), x) + 0.25 * F.mse_loss(z, quantised.detach())


@case(batch)
class CenteredTeacher(nn.Module):
    """DINO: the centre of a teacher's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("center", torch.zeros(1, D))

    def forward(self, x):
        with torch.no_grad():
            t = self.teacher(x)
        loss = -(F.softmax((t - self.center) / 0.04, -1) * F.log_softmax(self.student(x) / 0.1, -1)).sum(-1).mean()
        self.center = self.center * 0.9 + t.mean(0, keepdim=True) * 0.1
        return loss


@case(batch)
class SharedNormBuffer(nn.Module):
    """One batch norm called twice: the second call goes on from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)

    def forward(self, x):
        return self.norm(self.a(self.norm(x))).pow(3).mean() + self.a.weight.square().sum()


@case(lambda: call(ints(8, B, 4)))
class TokenHistogram(nn.Module):
    """Counts of what was seen, by index_add_ into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, D)
        self.register_buffer("histogram", torch.zeros(8))

    def forward(self, ids):
        self.histogram.index_add_(0, ids.flatten(), torch.ones(ids.numel()))
        weights = 1 / (1 + self.histogram)
        return (self.embed(ids) * weights[ids].unsqueeze(-1)).square().mean()


@case(batch)
class LayersWithState(nn.Module):
    """Six layers of one kind, each with a count and an average of its own."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(D, D)
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(D))

        def forward(self, x):
            self.steps += 1
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
            return x + torch.tanh(self.a(x - self.mean)) / self.steps

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@case(batch)
class WarmedUp(nn.Module):
    """A schedule in a buffer scales the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.register_buffer("step", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x):
        scale = torch.clamp(self.step / 2, max=1.0)
        self.step += 1
        return self.a(x).square().mean() * scale
