"""Integers that are configuration: lengths, grids and masks that decide sizes; and checks of values."""

import itertools

import torch
from torch import nn

from tests.faithful.case import call, case, floats, ints

B, S, D = 4, 6, 8


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def hidden(self, x):
        return self.b(self.a(x).relu())


@case(lambda: call(floats(B, S, D), torch.tensor([6, 4, 5, 3])))
class Lengths(_Head):
    """Each sample is cut to its length: sizes come from an input."""

    def forward(self, x, lengths):
        rows = [row[:n] for row, n in zip(self.hidden(x), lengths.tolist(), strict=True)]
        return torch.cat(rows).square().mean()


@case(lambda: call(floats(B, S, D), torch.tensor([[2, 3], [1, 4], [3, 2], [2, 2]])))
class Grids(_Head):
    """Positions made from the grids of images, as vision-language models do."""

    def forward(self, x, grids):
        places = [torch.arange(int(h))[:, None].expand(-1, int(w)).flatten() for h, w in grids]
        taken = torch.cat([row[: len(p)] * (1 + p[:, None]) for row, p in zip(self.hidden(x), places, strict=True)])
        return taken.square().mean()


def _where(shift: int = 0):
    """Other tokens in every step, images at the same places."""
    text = ints(10, B, S)
    text[:, 1 + shift : 3 + shift] = 99
    return call(text, floats(2 * B, D))


@case(_where)
class ImagesInText(nn.Module):
    """Rows of features take the places of their tokens; that there are as many is checked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project, self.head = nn.Embedding(100, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, ids, features):
        mask = ids == 99
        torch._check_tensor_all(mask.sum() == features.shape[0])
        h = self.embed(ids).masked_scatter(mask[..., None], self.project(features))
        return self.head(h[mask]).square().mean() + h.mean()


_steps = itertools.count()


@case(lambda: call(floats(B, S, D), torch.tensor([6, 4, 5, 3]) - next(_steps) % 2), refused="the plan was made for")
class OtherLengths(_Head):
    """The second batch has other lengths than the plan."""

    def forward(self, x, lengths):
        return torch.cat([row[:n] for row, n in zip(self.hidden(x), lengths.tolist(), strict=True)]).square().mean()


@case(lambda: call(floats(B, D), torch.tensor([3, 1, 2, 0])))
class Checked(_Head):
    """All that only looks whether values are as they should be."""

    def forward(self, x, kinds):
        assert kinds.max().item() < 4, "there are four kinds"
        if not torch.isfinite(x).all():
            raise ValueError("x is not finite")
        h = self.hidden(x)
        assert not h.isnan().any()
        assert h.abs().max() < 1e6 and h.shape[0] == x.shape[0]
        torch._check_tensor_all(kinds >= 0)
        return (h * kinds[:, None]).square().mean()


@case(lambda: call(floats(B, D), torch.tensor([3, 1, 2, 0])))
class BufferOfSizes(_Head):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.tensor([3, 5]))

    def forward(self, x, kinds):
        parts = self.hidden(x).split(self.sizes.tolist(), dim=-1)
        return parts[0].square().mean() - parts[1].mean() + kinds.to(x).mean()


@case(lambda: call(floats(B, D), torch.tensor([3, 1, 2, 0])))
class CaughtCheck(_Head):
    """A raise that is caught is no check: it chooses what is computed."""

    def forward(self, x, kinds):
        h = self.hidden(x)
        try:
            if h.sum() > 0:
                raise ValueError
        except ValueError:
            h = -h
        return h.mean()


@case(lambda: call(floats(B, D)))
class ChosenByValue(_Head):
    def forward(self, x):
        h = self.hidden(x)
        if h.sum() > 0:
            h = h.sqrt()
        return h.mean()
