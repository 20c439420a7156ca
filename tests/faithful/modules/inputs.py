"""What goes in: nested containers, names, positions, numbers and texts, inputs with gradients."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats, ints

B, D = 4, 8


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)


@case(lambda: call({"image": floats(B, D), "text": {"ids": ints(D, B), "mask": torch.ones(B)}}))
class NestedDict(_Two):
    def forward(self, batch):
        h = self.a(batch["image"]) + self.b.weight[batch["text"]["ids"]]
        return (h * batch["text"]["mask"][:, None]).square().mean()


@case(lambda: call([floats(B, D), floats(B, D), floats(B, D)]))
class ListOfTensors(_Two):
    def forward(self, frames):
        return torch.stack([self.a(f) for f in frames], 1).mean(1).sub(self.b(frames[-1])).square().mean()


@case(lambda: call((floats(B, D), (floats(B, D), 2.0))))
class NestedTuple(_Two):
    def forward(self, pair):
        x, (y, factor) = pair
        return F.mse_loss(self.a(x) * factor, self.b(y))


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


@case(lambda: call(Batch(floats(B, D), floats(B, D))))
class DataclassInput(_Two):
    def forward(self, batch):
        return F.mse_loss(self.a(batch.x), self.b(batch.y))


@case(lambda: call(floats(B, D), floats(B, D), floats(B, D)))
class StarredArguments(_Two):
    def forward(self, *xs):
        return sum(self.a(x).square().mean() for x in xs) + self.b(xs[0]).mean()


@case(lambda: call(x=floats(B, D), other=floats(B, D), third=floats(B, D)))
class KeywordArguments(_Two):
    def forward(self, x, **others):
        return self.a(x).square().mean() + sum(self.b(v).square().mean() for v in others.values())


@case(lambda: call(floats(B, D), y=floats(B, D)))
class PositionAndName(_Two):
    def forward(self, x, y=None, z=None):
        h = self.a(x) if y is None else self.a(x) + self.b(y)
        return h.square().mean()


@case(lambda: call(floats(B, D), return_dict=True, use_cache=False, scale=0.5, mode="mean"))
class Options(_Two):
    """Numbers, flags and texts among the arguments."""

    def forward(self, x, return_dict=False, use_cache=True, scale=1.0, mode="sum"):
        h = self.b(self.a(x).relu()) * scale
        loss = h.square().mean() if mode == "mean" else h.square().sum()
        return {"loss": loss, "cache": h if use_cache else None} if return_dict else (loss,)


@case(lambda: call(floats(B, D), None, [1, 2], ("sum", {"p": 2})))
class OddOptions(_Two):
    """None, a list of numbers, nested texts."""

    def forward(self, x, mask, sizes, how):
        h = self.a(x) if mask is None else self.a(x) * mask
        return self.b(h).pow(how[1]["p"]).sum() / sum(sizes)


def _wanting():
    return call(floats(B, D).requires_grad_(), floats(B, D))


@case(_wanting)
class GradientOfInput(_Two):
    """For saliency maps, or a model in front of this one."""

    def forward(self, x, y):
        return F.mse_loss(self.b(self.a(x).relu()), y)


def _twice():
    x = floats(B, D)
    return call(x, x)


@case(_twice)
class SameTensorTwice(_Two):
    def forward(self, x, y):
        return F.mse_loss(self.a(x), self.b(y))


@case(lambda: call(floats(B, D)))
class WritesToItsInput(_Two):
    """The caller's tensor is written: it sees that, and so does the next layer."""

    def forward(self, x):
        x.mul_(2)
        return self.b(self.a(x)).square().mean()


@case(lambda: call(floats(B, D), torch.tensor(0.5), torch.tensor(3)))
class ScalarTensors(_Two):
    def forward(self, x, temperature, power):
        return (self.a(x) / temperature).softmax(-1).pow(power).sum()


@case(lambda: call())
class NoInputs(_Two):
    """A model of its parameters alone."""

    def forward(self):
        return (self.a.weight @ self.b.weight - torch.eye(D)).square().mean()


@case(lambda: call(floats(1, D)))
class BatchOfOne(_Two):
    def forward(self, x):
        return self.b(self.a(x).relu()).square().mean()


@case(lambda: call(floats(3, 5), floats(5)))
class OddSizes(nn.Module):
    """Nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x, y):
        return self.b(self.a(x + y).relu()).square().mean()


@case(lambda: call(floats(B, D).transpose(0, 1).contiguous().t(), floats(B, 1).expand(B, D)))
class StridedInputs(_Two):
    """Transposed and expanded."""

    def forward(self, x, y):
        return F.mse_loss(self.a(x), self.b(y))


@case(lambda: call(ints(2, B, D).bool(), ints(9, B, D).to(torch.uint8)))
class BytesAndFlags(_Two):
    def forward(self, mask, image):
        x = image.to(self.a.weight.dtype) / 255
        return self.b(self.a(x).masked_fill(mask, 0.0)).square().mean()
