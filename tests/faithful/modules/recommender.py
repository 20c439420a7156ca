"""Recommenders: large tables, few numbers each."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats, ints

B, D = 8, 4


@case(lambda: call(floats(B, 4), ints(16, B, 3), torch.rand(B)))
class DeepInteraction(nn.Module):
    """DLRM: products of all pairs, taken by index."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(16, D) for _ in range(3))
        self.bottom, self.top = nn.Linear(4, D), nn.Linear(D + 6, 1)

    def forward(self, dense, sparse, labels):
        x = self.bottom(dense).relu()
        vectors = torch.stack([x] + [table(sparse[:, i]) for i, table in enumerate(self.tables)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        i, j = torch.tril_indices(4, 4, -1)
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, products[:, i, j]], 1)).squeeze(1), labels)


@case(lambda: call(ints(16, B, 3), torch.rand(B)))
class FactorizationMachine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v, self.bias = nn.Embedding(16, 1), nn.Embedding(16, D), nn.Parameter(torch.zeros(1))

    def forward(self, fields, labels):
        v = self.v(fields)
        pairs = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)
        logit = self.bias + self.w(fields).sum((1, 2)) + pairs
        return F.binary_cross_entropy(torch.sigmoid(logit), labels)


@case(lambda: call(ints(16, B), ints(32, B)))
class TwoTower(nn.Module):
    """Negatives from the same batch."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.item = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8))

    def forward(self, users, items):
        u, v = F.normalize(self.user(users), dim=-1), F.normalize(self.item(items), dim=-1)
        return F.cross_entropy(u @ v.T / 0.1, torch.arange(users.size(0)))


@case(lambda: call(ints(16, B, 4)))
class EmbeddingBagTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(16, D, mode="mean"), nn.Linear(D, 2)

    def forward(self, ids):
        return self.out(self.bag(ids)).square().mean()


@case(lambda: call(ints(16, B, 4), ints(2, B, 4).bool()))
class PaddedHistory(nn.Module):
    """padding_idx, and a mean over what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(16, D, padding_idx=0), nn.Linear(D, 1)

    def forward(self, ids, there):
        ids = torch.where(there, ids, 0)
        h = self.embed(ids).masked_fill(~there[..., None], 0.0).sum(1) / there.sum(1, keepdim=True).clamp(min=1)
        return self.out(h).square().mean()


@case(lambda: call(ints(16, B)), refused="sparse")
class SparseGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, D, sparse=True)

    def forward(self, ids):
        return self.embed(ids).square().mean()


@case(lambda: call(floats(B, 8), torch.rand(B, 2)))
class CrossNetworkWithTasks(nn.Module):
    """DCN under a mixture of towers, two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.experts = nn.ModuleDict({name: nn.Linear(8, 4) for name in ("a", "b", "c")})
        self.gates = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def forward(self, x, labels):
        x0 = x
        for layer in self.cross:
            x = x0 * layer(x) + x
        experts = torch.stack([expert(x).relu() for expert in self.experts.values()], 1)
        losses = []
        for t, (gate, head) in enumerate(zip(self.gates, self.heads, strict=True)):
            mixed = torch.einsum("be,bed->bd", gate(x).softmax(-1), experts)
            losses.append(F.mse_loss(head(mixed).squeeze(-1), labels[:, t]))
        return sum(losses)
