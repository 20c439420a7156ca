"""Mixtures of experts."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats

B, S, D, E = 4, 4, 8, 4


def tokens():
    return call(floats(B, S, D))


@case(tokens)
class SoftExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        y = torch.stack([expert(x) for expert in self.experts], -1)
        return (y * weights.unsqueeze(-2)).sum(-1).square().mean()


@case(tokens)
class TopKExperts(nn.Module):
    """All experts on all tokens, weighted by a sparse gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, D, 16) * 0.3), nn.Parameter(torch.randn(E, 16, D) * 0.3)

    def forward(self, x):
        x = x.reshape(-1, D)
        scores, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        scores = scores / scores.sum(-1, keepdim=True)
        weights = torch.zeros(x.size(0), E).scatter(1, chosen, scores)
        h = torch.einsum("td,edf->etf", x, self.up).relu()
        return torch.einsum("etf,efd,te->td", h, self.down, weights).square().mean()


@case(tokens)
class SwitchWithBalance(nn.Module):
    """One expert a token, a loss for balance, and how many tokens each had."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w = nn.Linear(D, E), nn.Parameter(torch.randn(E, D, D))
        self.register_buffer("load", torch.zeros(E))

    def forward(self, x):
        x = x.flatten(0, 1)
        probs = self.gate(x).softmax(-1)
        best, index = probs.max(-1)
        hits = F.one_hot(index, E).to(x.dtype)
        with torch.no_grad():
            self.load += hits.sum(0)
        y = torch.einsum("td,edf,te->tf", x, self.w, hits) * best.unsqueeze(-1)
        balance = E * (hits.mean(0) * probs.mean(0)).sum()
        return {"loss": y.square().mean() + 0.01 * balance, "balance": balance}


@case(tokens)
class GatheredExperts(nn.Module):
    """Every token fetches the matrices of its expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w = nn.Linear(D, E), nn.Parameter(torch.randn(E, D, D))

    def forward(self, x):
        weight, index = self.gate(x).softmax(-1).max(-1)
        y = torch.einsum("bsd,bsdf->bsf", x, self.w[index])
        return (y * weight.unsqueeze(-1)).pow(2).mean()


@case(tokens)
class CapacityExperts(nn.Module):
    """Dispatch and combine by one-hot products, with a capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w1, self.w2 = (
            nn.Linear(D, E),
            nn.Parameter(torch.randn(E, D, D)),
            nn.Parameter(torch.randn(E, D, D)),
        )

    def forward(self, x):
        x = x.reshape(-1, D)
        probs = F.softmax(self.gate(x), -1)
        mask = F.one_hot(probs.argmax(-1), E)
        place = (mask.cumsum(0) - 1) * mask
        kept = mask * (place < 6)
        slot = F.one_hot((place * kept).sum(-1), 6) * kept.sum(-1, keepdim=True)
        dispatch = kept.unsqueeze(-1) * slot.unsqueeze(1)
        sent = torch.einsum("tec,td->ecd", dispatch.to(x.dtype), x)
        h = torch.bmm(F.silu(torch.bmm(sent, self.w1)), self.w2)
        y = torch.einsum("tec,ecd->td", dispatch * probs.unsqueeze(-1), h)
        return y.square().sum()


@case(tokens)
class LoopOverHitExperts(nn.Module):
    """As many have it: a loop whose length the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x):
        x = x.reshape(-1, D)
        index = self.gate(x).argmax(-1)
        y = torch.zeros_like(x)
        for e in index.unique().tolist():
            rows = torch.where(index == e)[0]
            y[rows] = self.experts[e](x[rows])
        return y.square().mean()
