"""What comes out: inputs, buffers, constants, detached, lists of one, nested containers."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats, ints

B, D = 4, 8


def batch():
    return call(floats(B, D))


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, D))


@case(batch)
class ReturnsABuffer(_Linear):
    def forward(self, x):
        return self.a(x).mul(self.scale).square().mean(), self.scale


@case(batch)
class ReturnsItsInput(_Linear):
    def forward(self, x):
        return {"loss": self.a(x).square().mean(), "x": x}


@case(batch)
class ReturnsConstants(_Linear):
    """A tensor made in forward, a number, a text and nothing."""

    def forward(self, x):
        return {"loss": self.a(x).square().mean(), "ones": torch.ones(2), "n": 3, "name": "linear", "none": None}


@case(batch)
class ReturnsDetached(_Linear):
    def forward(self, x):
        h = self.a(x)
        return h.square().mean(), h.detach(), h.argmax(-1), h.detach().mean()


@case(batch)
class ReturnsAParameter(_Linear):
    def forward(self, x):
        return {"loss": self.a(x).square().mean(), "weight": self.a.weight}


@case(batch)
class ReturnsTheSameTwice(_Linear):
    def forward(self, x):
        loss = self.a(x).square().mean()
        return {"loss": loss, "also": loss, "list": [loss, loss * 2]}


@case(batch)
class NestedOutput(_Linear):
    def forward(self, x):
        h = self.a(x)
        return OrderedDict(loss=h.square().mean(), parts=[(h[:2], h[2:]), {"max": h.max(-1)}])


@dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor


@case(batch)
class DataclassOutput(_Linear):
    def forward(self, x):
        h = self.a(x)
        return Result(h.square().mean(), h)


@case(batch)
class ChunkOfOne(_Linear):
    def forward(self, x):
        (y,) = self.a(x).chunk(1, -1)
        return y.square().mean()


@case(batch)
class SplitOfOne(_Linear):
    def forward(self, x):
        return self.a(x).split(D, dim=1)[0].square().mean()


@case(lambda: call(floats(1, D, D)))
class UnbindOfOne(_Linear):
    def forward(self, x):
        (y,) = self.a(x).unbind(0)
        return y.square().mean()


@case(batch)
class MeshgridOfOne(_Linear):
    def forward(self, x):
        (place,) = torch.meshgrid(torch.arange(D), indexing="ij")
        return (self.a(x) * place).square().mean()


@case(batch)
class MeshgridOfTwo(_Linear):
    def forward(self, x):
        i, j = torch.meshgrid(torch.arange(B), torch.arange(D), indexing="ij")
        return (self.a(x) * (i - j)).square().mean()


@case(batch)
class TensorSplitUneven(_Linear):
    def forward(self, x):
        a, b, c = torch.tensor_split(self.a(x), 3, dim=-1)
        return a.square().sum() + b.abs().sum() + c.sum()


@case(batch, train=False)
class Classifier(_Linear):
    """Inference, with several results of one operator."""

    def forward(self, x):
        values, index = self.a(x).softmax(-1).topk(2)
        return {"scores": values, "labels": index, "sorted": self.a(x).sort(-1, descending=True)}


@case(lambda: call(ints(16, B, 4)), train=False)
class Pipeline(nn.Module):
    """In evaluation mode, with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(16, D), nn.Flatten(), nn.BatchNorm1d(4 * D), nn.Dropout(), nn.Linear(4 * D, 4)
        )
        self.eval()

    def forward(self, ids):
        return F.log_softmax(self.net(ids), -1)


@case(batch)
class ZeroDimensional(_Linear):
    """Scalars everywhere, and a loss of shape (1,)."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (self.gain * self.a(x).std() + self.gain.square()).reshape(1)


@case(batch)
class UnusedParameters(_Linear):
    """Some take part in nothing, some only in what is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.dropped = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        self.dropped(x)
        return self.a(x).square().mean()
