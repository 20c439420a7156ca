"""Whole small transformers, in the styles of their families."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats, ints

B, S, D, H, V = 4, 6, 16, 4, 16


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, n, bias=False) for n in (D, D // 2, D // 2, D))
        self.gate, self.up, self.down = nn.Linear(D, 32, False), nn.Linear(D, 32, False), nn.Linear(32, D, False)

    def forward(self, x, mask):
        b, s, _ = x.shape
        h = self.n1(x)
        q = self.q(h).view(b, s, H, -1).transpose(1, 2)
        k, v = (f(h).view(b, s, H // 2, -1).transpose(1, 2).repeat_interleave(2, 1) for f in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, s, D)
        x = x + self.o(y)
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


@case(lambda: call(input_ids=ints(V, B, S), labels=ints(V, B, S)))
class SmallLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(V, D), nn.ModuleList(LlamaLayer() for _ in range(3))
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        mask = torch.full((S, S), float("-inf")).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


@case(lambda: call(ints(V, B, S), ints(V, B, S)))
class ParallelBlocks(nn.Module):
    """GPT-J: attention and MLP side by side, one norm; embeddings tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(V, D), nn.Embedding(S, D)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.attn = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.Linear(32, D)) for _ in range(2))

    def forward(self, ids, labels):
        x = self.embed(ids) + self.pos(torch.arange(ids.shape[1]))
        for norm, attn, mlp in zip(self.norms, self.attn, self.mlp, strict=True):
            h = norm(x)
            q, k, v = (t.view(B, S, H, -1).transpose(1, 2) for t in attn(h).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).reshape(B, S, D) + mlp(h)
        return F.cross_entropy((x @ self.embed.weight.t()).view(-1, V), labels.view(-1))


@case(lambda: call(ints(V, B, S), ints(V, B, 4), ints(V, B, 4)))
class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.model = nn.Transformer(D, H, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(D, V)

    def forward(self, source, target, labels):
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        y = self.model(self.embed(source), self.embed(target), tgt_mask=mask)
        return F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())


@case(lambda: call(ints(V, B, S), ints(2, B, S), (torch.rand(B, S) > 0.2).long(), ints(V, B, S)))
class MaskedLanguageModel(nn.Module):
    """BERT: three embeddings, a padding mask, a tied decoder with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.kind, self.place = nn.Embedding(V, D), nn.Embedding(2, D), nn.Embedding(S, D)
        self.register_buffer("position_ids", torch.arange(S).expand((1, -1)), persistent=False)
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.bias = nn.Parameter(torch.zeros(V))

    def forward(self, ids, kinds, mask, labels):
        x = self.norm(self.word(ids) + self.kind(kinds) + self.place(self.position_ids[:, :S]))
        q, k, v = self.qkv(x).view(B, S, 3, H, D // H).permute(2, 0, 3, 1, 4)
        extended = (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        y = torch.matmul((q @ k.transpose(-1, -2) / 2 + extended).softmax(-1), v)
        x = self.norm(x + self.out(y.permute(0, 2, 1, 3).reshape(B, S, D)))
        return F.cross_entropy((x @ self.word.weight.T + self.bias).view(-1, V), labels.view(-1))


@case(lambda: call(floats(B, S, D)))
class SharedLayers(nn.Module):
    """ALBERT and universal transformers: one layer, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = LlamaLayer()

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x, None)
        return x.square().mean()


@case(lambda: call(floats(B, S, D)))
class MlpMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels, self.norm = nn.Linear(S, S), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x):
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return (x + F.gelu(self.channels(self.norm(x)))).square().mean()


@case(lambda: call(floats(2, 4, 4, D)))
class DividedSpaceTime(nn.Module):
    """TimeSformer: attention over time, then over space, by reshaping."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.space = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D)

    def attend(self, x, layer):
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in layer(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x):
        b, t, s, d = x.shape
        x = x + self.attend(x.permute(0, 2, 1, 3).reshape(b * s, t, d), self.time).view(b, s, t, d).transpose(1, 2)
        x = x + self.attend(x.reshape(b * t, s, d), self.space).view(b, t, s, d)
        return x.square().mean()


@case(lambda: call(floats(B, 4, 5, 3, 2), ints(4, B)))
class ManyDims(nn.Module):
    """Five dims flattened to three and back, with a factor that does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 8), nn.Linear(8, 4)

    def forward(self, x, y):
        h = self.a(x).reshape(B, 4 * 5 * 3, 8).relu()
        h = h.view(B, 20, 3, 8).mean(2).view(B, 4, 5, 8).transpose(1, 2).flatten(1, 2)
        return F.cross_entropy(self.b(h).mean(1), y)
