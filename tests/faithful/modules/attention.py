"""Attention in the ways in which it is written."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats

B, S, D, H = 4, 6, 16, 4


def sequence():
    return call(floats(B, S, D))


@case(sequence)
class CausalSelfAttention(nn.Module):
    """As in nanoGPT: one matrix for Q, K and V."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(D, dim=2)
        k = k.view(b, t, H, c // H).transpose(1, 2)
        q = q.view(b, t, H, c // H).transpose(1, 2)
        v = v.view(b, t, H, c // H).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)).square().mean()


@case(sequence)
class MaskedAttention(nn.Module):
    """Written out, with the mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.register_buffer("bias", torch.tril(torch.ones(S, S)).view(1, 1, S, S))

    def forward(self, x):
        q, k, v = (f(x).view(B, -1, H, D // H).transpose(1, 2) for f in (self.q, self.k, self.v))
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(self.bias[:, :, :S, :S] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.o(y.transpose(1, 2).reshape(B, -1, D)).pow(2).sum()


@case(sequence)
class GroupedQueryAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.q(x).view(b, s, 4, 4).transpose(1, 2)
        k, v = self.kv(x).view(b, s, 2, 2, 4).unbind(2)
        k = k.transpose(1, 2).repeat_interleave(2, dim=1)
        v = v.transpose(1, 2).repeat_interleave(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2)).abs().mean()


@case(sequence)
class MultiQueryAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(D, D), nn.Linear(D, 8), nn.Linear(D, D)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.q(x).view(b, s, H, 4).transpose(1, 2)
        k, v = self.kv(x).chunk(2, -1)
        weights = torch.einsum("bhqd,bkd->bhqk", q, k).mul(0.5).softmax(-1)
        y = torch.einsum("bhqk,bkd->bqhd", weights, v).reshape(b, s, D)
        return self.o(y).square().mean()


@case(lambda: call(floats(B, S, D), floats(B, 8, D)))
class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, H, batch_first=True)
        self.norm = nn.LayerNorm(D)

    def forward(self, x, memory):
        y, _ = self.attn(self.norm(x), memory, memory, need_weights=False)
        return (x + y).square().mean()


@case(sequence)
class AttentionWithWeights(nn.Module):
    """Returns the weights of the heads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x):
        y, weights = self.attn(x, x, x, average_attn_weights=False)
        return {"loss": y.square().mean(), "weights": weights}


@case(sequence)
class RotaryAttention(nn.Module):
    """Rotary tables from a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 4, 2) / 4)), persistent=False)

    def rotate(self, x):
        t = torch.arange(x.shape[-2], device=x.device)
        angles = torch.outer(t, self.inv_freq)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        x1, x2 = x.chunk(2, -1)
        return x * cos + torch.cat([-x2, x1], -1) * sin

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, H, d // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, d)).square().mean()


@case(sequence)
class ComplexRotary(nn.Module):
    """Rotary by complex numbers, as Llama's first code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        angles = torch.outer(torch.arange(S).double(), 1.0 / (10000 ** (torch.arange(0, 4, 2) / 4)))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x):
        q, k = (f(x).view(B, S, H, 2, 2) for f in (self.q, self.k))
        freqs = self.freqs_cis.view(1, S, 1, 2)
        q, k = (torch.view_as_real(torch.view_as_complex(t.contiguous()) * freqs).flatten(3) for t in (q, k))
        return torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1).square().mean()


@case(sequence)
class AlibiAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, H + 1))

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = (t.view(b, s, H, d // H).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        place = torch.arange(s)
        bias = -self.slopes.view(H, 1, 1) * (place[None] - place[:, None]).abs()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.o(y.transpose(1, 2).reshape(b, s, d)).square().mean()


@case(sequence)
class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (H, D // H)) for f in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bshd,bshe->bhde", k, v)
        norm = 1 / torch.einsum("bshd,bhd->bsh", q, k.sum(1))
        return torch.einsum("bshd,bhde,bsh->bshe", q, kv, norm).square().mean()


@case(lambda: call(floats(B, 8, D)))
class WindowAttention(nn.Module):
    """Windows of a shifted sequence, with a learned bias for relative places."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.table = nn.Parameter(torch.zeros(7, H))
        place = torch.arange(4)
        self.register_buffer("index", place[:, None] - place[None] + 3)

    def forward(self, x):
        shifted = torch.roll(x, -2, dims=1)
        windows = shifted.view(B * 2, 4, D)
        q, k, v = self.qkv(windows).reshape(B * 2, 4, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index.view(-1)].view(4, 4, H).permute(2, 0, 1)
        att = (q @ k.transpose(-2, -1) * 0.5 + bias).softmax(-1)
        y = (att @ v).transpose(1, 2).reshape(B * 2, 4, D)
        return (x + torch.roll(self.proj(y).view(B, 8, D), 2, dims=1)).square().mean()


@case(lambda: call(floats(B, S, D), torch.arange(S)[None] < torch.tensor([3, 4, 5, 6])[:, None]))
class PaddedAttention(nn.Module):
    """A mask for padding, one length per sequence, and the mean over what is not padded."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x, mask):
        y, _ = self.attn(x, x, x, key_padding_mask=~mask, need_weights=False)
        y = y * mask.unsqueeze(-1)
        return (y.sum(1) / mask.sum(1, keepdim=True)).square().sum()


@case(lambda: call(floats(B, 8, D)))
class PerceiverPooling(nn.Module):
    """Learned queries."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(2, D))
        self.kv = nn.Linear(D, 2 * D)

    def forward(self, x):
        k, v = self.kv(x).chunk(2, -1)
        q = self.latents.expand(x.size(0), -1, -1)
        pooled = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1) @ v
        return torch.logsumexp(pooled, -1).mean()


@case(sequence)
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(D, H, 32, dropout=0.0, batch_first=True, norm_first=True)
    return _Mean(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


class _Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).square().mean()
