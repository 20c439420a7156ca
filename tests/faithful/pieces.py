"""What generated modules are made of: each takes [batch, sequence, features] and returns the same shape."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

B, S, D = 4, 4, 8


class Piece(NamedTuple):
    family: str
    make: Callable[[], nn.Module]
    weight: float  # how often it is chosen, beside others


PIECES: dict[str, Piece] = {}
Made = TypeVar("Made", bound=Callable[[], nn.Module])


def piece(family: str, weight: float = 1.0) -> Callable[[Made], Made]:
    def register(make: Made) -> Made:
        PIECES[make.__name__] = Piece(family, make, weight)
        return make

    return register


class Plain(nn.Module):
    """A function without parameters."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def plain(name: str, family: str, function: Callable[[torch.Tensor], torch.Tensor], weight: float = 1.0) -> None:
    PIECES[name] = Piece(family, lambda: Plain(function), weight)


plain("relu", "pointwise", F.relu)
plain("gelu", "pointwise", F.gelu)
plain("tanh_times", "pointwise", lambda x: torch.tanh(x) * 1.5 - 0.1)
plain("clamp", "pointwise", lambda x: x.clamp(-1.5, 1.5))
plain("where_positive", "pointwise", lambda x: torch.where(x > 0, x, 0.1 * x.square()))
plain("masked_fill", "pointwise", lambda x: x.masked_fill(torch.ones(S, 1).tril(-1).bool(), 0.5))
plain("by_position", "create", lambda x: x + torch.arange(x.shape[1]).unsqueeze(-1) / 10)
plain("eye", "create", lambda x: x @ (torch.eye(D) + 0.1 * torch.ones(D, D).triu(1)))
plain("meshgrid", "create", lambda x: x * sum(torch.meshgrid(torch.arange(S), torch.arange(D), indexing="ij")).div(9))
plain("softmax", "reduce", lambda x: x.softmax(-1) * D)
plain("softmax_sequence", "reduce", lambda x: x * x.softmax(1))
plain("center", "reduce", lambda x: x - x.mean(-1, keepdim=True))
plain("standardise", "reduce", lambda x: (x - x.mean(0)) / (x.std(0, unbiased=False) + 1))
plain("subtract_max", "reduce", lambda x: x - x.amax(1, keepdim=True).detach())
plain("logsumexp", "reduce", lambda x: x - torch.logsumexp(x, 2, keepdim=True))
plain("unit_norm", "reduce", lambda x: F.normalize(x, dim=-1) * 2)
plain("cumsum", "scan", lambda x: x.cumsum(1) / S)
plain("flip_cumsum", "scan", lambda x: x.flip(1).cumsum(1).flip(1) / S)
plain("sort", "sort", lambda x: x.sort(-1).values)
plain("topk_mask", "sort", lambda x: x * (x >= x.topk(3, -1).values[..., -1:]))
plain("argsort_gather", "sort", lambda x: x.gather(1, x.argsort(1)))
plain("roll", "shape", lambda x: torch.roll(x, 1, 1))
plain("flip", "shape", lambda x: x.flip(-1))
plain("merge_split", "shape", lambda x: x.reshape(B * S, D).view(B, S, D) + 0.1)
plain("heads", "shape", lambda x: x.view(B, S, 2, 4).transpose(1, 2).tanh().transpose(1, 2).reshape(B, S, D))
plain("swap_merge", "shape", lambda x: x.transpose(0, 1).reshape(S, B * D).relu().view(S, B, D).transpose(0, 1))
plain("permute", "shape", lambda x: x.permute(2, 0, 1).contiguous().sin().permute(1, 2, 0))
plain("chunk_swap", "shape", lambda x: torch.cat(x.chunk(2, -1)[::-1], -1))
plain("chunk_of_one", "shape", lambda x: x.chunk(1, 1)[0], 0.3)
plain("split_of_one", "shape", lambda x: x.split(D, -1)[0], 0.3)
plain("unbind_stack", "shape", lambda x: torch.stack([t * (i + 1) for i, t in enumerate(x.unbind(1))], 1) / S)
plain("shift_by_cat", "shape", lambda x: torch.cat([torch.zeros(B, 1, D), x[:, :-1]], 1))
plain("pad_and_cut", "shape", lambda x: F.pad(x, (0, 0, 2, 1), value=0.5)[:, 1 : S + 1])
plain("every_other", "shape", lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1))
plain("expand", "shape", lambda x: x[:, :1].expand(-1, S, -1) + x)
plain("repeat", "shape", lambda x: x[..., :4].repeat(1, 1, 2) * x)
plain("repeat_interleave", "shape", lambda x: x[:, :2].repeat_interleave(2, 1) - x)
plain("squeeze", "shape", lambda x: x.unsqueeze(1).add(1).squeeze(1))
plain("unfold", "shape", lambda x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1))
plain("tensor_split", "shape", lambda x: torch.cat([t * (i + 1) for i, t in enumerate(x.tensor_split(3, -1))], -1))
plain("index_rows", "index", lambda x: x[:, torch.tensor([3, 1, 0, 2])])
plain("index_select", "index", lambda x: x.index_select(2, torch.arange(D).flip(0)))
plain("fancy_index", "index", lambda x: x[torch.arange(B)[:, None], torch.tensor([[0, 2, 1, 3]])])
plain("index_add", "index", lambda x: torch.zeros(B, S, D).index_add(1, torch.tensor([0, 0, 2, 3]), x))
plain("scatter", "index", lambda x: x.scatter(2, torch.zeros(B, S, 1, dtype=torch.long), 0.5))
plain("gather_best", "index", lambda x: x + x.gather(2, x.argmax(-1, keepdim=True)))
plain("take_along", "index", lambda x: torch.take_along_dim(x, (x[..., :1] > 0).long(), 1) + x)
plain("one_hot", "index", lambda x: x * F.one_hot(x.argmax(-1), D))
plain("write_row", "inplace", lambda x: _write(x.clone()))
plain("add_in_place", "inplace", lambda x: (x * 2).add_(1).mul_(0.5))
plain("write_view", "inplace", lambda x: _through_view(x + 0))
plain("fft", "fft", lambda x: torch.fft.fft(x, dim=1).real / S)
plain("rfft_filter", "fft", lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=-1) * 0.5, n=D, dim=-1))
plain("similarity", "matmul", lambda x: torch.softmax(x @ x.transpose(1, 2), -1) @ x)
plain("outer_mean", "matmul", lambda x: torch.einsum("bsd,bse->bde", x, x).mean(1, keepdim=True) + x)
plain("bmm", "matmul", lambda x: torch.bmm(x, x.mT) @ x / D)
plain("cdist", "matmul", lambda x: torch.cdist(x, x).neg().exp() @ x / S)
plain("detach_half", "gradient", lambda x: x + x.detach() * 0.5)
plain("stop_sequence", "gradient", lambda x: torch.cat([x[:, :1].detach(), x[:, 1:]], 1))
plain("vmap", "function", lambda x: torch.vmap(torch.tanh)(x), 0.1)


def _write(x: torch.Tensor) -> torch.Tensor:
    x[:, 0] = 1.0
    x[..., 1:3] *= 2
    return x


def _through_view(x: torch.Tensor) -> torch.Tensor:
    x.view(B, S, 2, 4)[:, :, 1].mul_(3)
    return x


class Weighted(nn.Module):
    """A layer of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)


@piece("linear", 4)
def linear() -> nn.Module:
    return nn.Linear(D, D)


@piece("linear", 3)
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D))


@piece("linear", 2)
class Gated(Weighted):
    def forward(self, x):
        return F.silu(self.a(x)) * self.b(x)


@piece("linear")
class TiedTranspose(Weighted):
    def forward(self, x):
        return torch.tanh(self.a(x)) @ self.a.weight


@piece("linear")
class MixTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(S, S)

    def forward(self, x):
        return self.mix(x.mT).mT


@piece("linear")
class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, D, D) / 3)

    def forward(self, x):
        return torch.einsum("bsd,hde,bse->bsh", x, self.w, x).repeat(1, 1, 4)


@piece("linear")
class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, D) / 3), nn.Parameter(torch.randn(D, 2) / 3)

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


@piece("attention", 3)
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = (t.view(B, S, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, D))


@piece("attention", 2)
class WrittenAttention(Weighted):
    def forward(self, x):
        q, k = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.a, self.b))
        scores = (q @ k.mT / 2).masked_fill(torch.ones(S, S).triu(1).bool(), float("-inf"))
        v = x.view(B, S, 2, 4).permute(0, 2, 1, 3)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@piece("attention")
class MultiheadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x)[0]


@piece("norm", 2)
def layer_norm() -> nn.Module:
    return nn.LayerNorm(D)


@piece("norm")
def rms_norm() -> nn.Module:
    return nn.RMSNorm(D)


class _Channels(nn.Module):
    """For modules that want channels in front of the sequence."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


@piece("norm")
def group_norm() -> nn.Module:
    return _Channels(nn.GroupNorm(2, D))


@piece("norm")
def frozen_batch_norm() -> nn.Module:
    return _Channels(nn.BatchNorm1d(D, track_running_stats=False))


@piece("state", 0.5)
def batch_norm() -> nn.Module:
    return _Channels(nn.BatchNorm1d(D))


@piece("convolution")
def conv() -> nn.Module:
    return _Channels(nn.Conv1d(D, D, 3, padding=1))


@piece("convolution")
def depthwise() -> nn.Module:
    return _Channels(nn.Conv1d(D, D, 3, padding=1, groups=D))


@piece("convolution")
def pooled() -> nn.Module:
    return _Channels(nn.AvgPool1d(3, 1, 1))


@piece("convolution")
class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x):
        return F.max_pool2d(self.conv(x.unsqueeze(1)), (1, 2)).transpose(1, 2).reshape(B, S, D)


@piece("recurrent")
class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(D, D, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


@piece("recurrent")
class Loop(Weighted):
    def forward(self, x):
        h, out = torch.zeros(B, D), []
        for t in range(S):
            h = torch.tanh(self.a(x[:, t]) + self.b(h))
            out.append(h)
        return torch.stack(out, 1)


@piece("experts")
class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w = nn.Linear(D, 4), nn.Parameter(torch.randn(4, D, D) / 3)

    def forward(self, x):
        best, index = self.gate(x).softmax(-1).topk(2, -1)
        weights = torch.zeros(B, S, 4).scatter(-1, index, best)
        return torch.einsum("bsd,edf,bse->bsf", x, self.w, weights)


@piece("experts")
class ExpertByIndex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w = nn.Linear(D, 4), nn.Parameter(torch.randn(4, D, D) / 3)

    def forward(self, x):
        return torch.einsum("bsd,bsdf->bsf", x, self.w[self.gate(x).argmax(-1)])


@piece("embedding")
class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(8, D)

    def forward(self, x):
        return x + self.codes(x.argmax(-1))


@piece("embedding")
class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(S, D)

    def forward(self, x):
        return x + self.embed(torch.arange(x.size(1)))


@piece("embedding")
class ClassToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x):
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x[:, 1:]], 1)


@piece("constant")
class Table(nn.Module):
    """A buffer and a tensor that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, S * D).view(S, D))
        self.other = torch.linspace(1, 2, D)

    def forward(self, x):
        return x * self.table[: x.size(1)] + self.other


@piece("quantised")
class FakeQuantised(Weighted):
    def forward(self, x):
        w = self.a.weight
        scale = w.detach().abs().amax(1, keepdim=True) / 7
        return F.linear(x, w + ((w / scale).round() * scale - w).detach(), self.a.bias)


@piece("quantised")
class Bytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("q", torch.randint(-127, 127, (D, D)).to(torch.int8))

    def forward(self, x):
        return x @ (self.q.to(x.dtype) / 300)


@piece("quantised")
class BytesBetween(nn.Module):
    """As large as a buffer has to be to be a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("up", torch.randint(-127, 127, (512, D)).to(torch.int8))
        self.register_buffer("down", torch.randint(0, 256, (D, 256)).to(torch.uint8))
        self.register_buffer("scale", torch.rand(512, 1) / 300)

    def forward(self, x):
        w = torch.stack([self.down >> 4, self.down & 15], -1).flatten(1).to(x.dtype) - 8
        return F.linear(F.linear(x, self.up.to(x.dtype) * self.scale).relu(), w / 300)


@piece("gradient")
class Teacher(Weighted):
    def forward(self, x):
        with torch.no_grad():
            target = self.a(x)
        return self.b(x) - target


@piece("gradient")
class UsedTwice(Weighted):
    """Once where a gradient flows, once where none does."""

    def forward(self, x):
        return self.a(x) + self.a(x.detach()).argmax(-1, keepdim=True) * 0.1


@piece("state", 0.5)
class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n += 1
        return x / self.n


@piece("state", 0.5)
class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x - self.mean


@piece("state", 0.3)
class LastBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(B, S, D))

    def forward(self, x):
        y = x + 0.5 * self.last
        self.last.copy_(x.detach())
        return y


@piece("state", 0.3)
class Assigned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, D))

    def forward(self, x):
        self.seen = self.seen * 0.5 + x.detach().amax((0, 1)).unsqueeze(0)
        return x + self.seen


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


plain("straight_through", "function", lambda x: _Sign.apply(x), 0.5)  # type: ignore[arg-type,return-value]


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return -grads[0]


plain("reverse", "function", lambda x: _Reverse.apply(x), 0.5)  # type: ignore[arg-type,return-value]
