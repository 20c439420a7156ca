"""Code whose control flow or sizes depend on activations: it stays whole, and everything around it is planned."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats, ints

B, D, E = 8, 16, 4


def batch():
    return call(floats(B, D))


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def hidden(self, x):
        return self.down(F.gelu(self.up(x)))


@case(batch)
class RowsThatAreLarge(_Layers):
    """nonzero: as many rows as the data says."""

    def forward(self, x):
        h = self.hidden(x)
        rows = (h[:, 0] > h[:, 1]).nonzero()[:, 0]
        return h[rows].square().sum() + h.mean()


@case(batch)
class PickedByMask(_Layers):
    def forward(self, x):
        h = self.hidden(x)
        h[h > 0.1] = 0.5 * h[h > 0.1]
        return self.hidden(h).square().mean()


@case(batch)
class ScaledByNumber(_Layers):
    """A number that is read, and used some lines later."""

    def forward(self, x):
        h = self.hidden(x)
        most = h.abs().max().item()
        shifted = h + 1
        if most > 0.5:
            shifted = shifted / most
        return self.hidden(shifted).square().mean()


@case(batch)
class FiniteOrClamped(_Layers):
    """As in DETR: a branch that seldom is taken, and changes values."""

    def forward(self, x):
        h = self.hidden(x)
        if not torch.isfinite(h).all() or h.abs().max() > 0.6:
            most = 0.4
            h = torch.clamp(h, min=-most, max=most)
        return self.hidden(h).square().mean()


class _Mixture(nn.Module):
    """Experts that are hit; how often is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.GELU()) for _ in range(E))
        self.register_buffer("hits", torch.zeros(E, dtype=torch.long))

    def forward(self, x):
        weight, index = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        mask = F.one_hot(index, E).permute(2, 1, 0)
        for expert in (mask.sum((-1, -2)) > 0).nonzero():
            number = int(expert)
            slot, row = torch.where(mask[number])
            self.hits[number] += row.numel()
            out.index_add_(0, row, self.experts[number](x[row]) * weight[row, slot, None])
        return out


@case(batch)
class HitExperts(_Layers):
    def __init__(self) -> None:
        super().__init__()
        self.mixture = _Mixture()

    def forward(self, x):
        return self.hidden(x + self.mixture(self.hidden(x))).square().mean()


@case(batch)
class MixtureInEveryLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HitExperts() for _ in range(2))
        self.head = nn.Linear(D, D)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer.mixture(layer.hidden(x))
        return self.head(x).square().mean()


class _Matched(nn.Module):
    """A loss that pairs predictions with targets on the host, as those of detection do."""

    def forward(self, outputs, targets):
        cost = torch.cdist(outputs["boxes"], targets["boxes"], p=1)
        pairs = [row.argmin().item() for row in cost.detach()]
        chosen = targets["boxes"][pairs]
        return {"boxes": (outputs["boxes"] - chosen).abs().sum(), "size": outputs["boxes"].square().mean()}


@case(lambda: call(floats(B, D), floats(3, D)))
class MatchingLoss(_Layers):
    """The module that computes it is made in forward."""

    def forward(self, x, boxes):
        losses = _Matched()({"boxes": self.hidden(x)}, {"boxes": boxes})
        return losses["boxes"] + 0.1 * losses["size"]


@case(lambda: call(floats(B, D), ints(E, B)))
class SeveralReturns(_Layers):
    """A function that returns here or there."""

    def forward(self, x, kinds):
        return F.cross_entropy(_flipped(self.hidden(x))[:, :E], kinds)


def _flipped(h):
    if h.sum() > 0:
        return -h
    for row in range(h.shape[0]):
        if h[row, 0] > 0.3:
            return h.flip(-1)
    return h


@case(batch)
class InPieces(_Layers):
    """A list whose length the data says."""

    def forward(self, x):
        h = self.hidden(x)
        parts = []
        for length in h.detach().softmax(0)[:, 0].mul(4).ceil().long().tolist():
            parts.append(h[:length].sum(0))
        h = torch.stack(parts)
        return self.hidden(h).square().mean()


@case(batch, random=True)
class DropoutInside(_Layers):
    """Random numbers are the same on all ranks."""

    def forward(self, x):
        return self.hidden(_dropped(self.hidden(x))).square().mean()


def _dropped(h):
    if h.sum() > 100:
        return h
    return F.dropout(h, 0.5)


@case(batch)
class WithoutGradients(_Layers):
    """What is around the code says that no gradient comes back."""

    def forward(self, x):
        h = self.hidden(x)
        with torch.no_grad():
            shift = h + 1
            if h.sum() > -1e9:
                shift = self.hidden(shift)
        return (h + shift).square().mean()


@case(batch, dtype=torch.float32, tolerance=2e-2)
class InOwnPrecision(_Layers):
    """An autocast of the module's own is part of the code."""

    def forward(self, x):
        h = self.hidden(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if h.sum() > -1e9:
                h = self.hidden(h)
        return h.float().square().mean()
