"""Spellings that captures trip over."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats, ints

B, D = 4, 8


def batch():
    return call(floats(B, D))


@case(batch)
class InPlaceEverywhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        h = self.a(x)
        h.add_(1).mul_(0.5)
        h[:, 0] = 0.0
        h[:, 1:3] *= 2
        h.relu_()
        return self.b(h).clamp_(-1, 1).square_().mean()


@case(batch)
class ViewsOfOne(nn.Module):
    """A view is written, and read through its base."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x):
        h = self.a(x).clone()
        h.view(B, 2, 4)[:, 1].mul_(3)
        h.t()[0].fill_(1.0)
        return h.square().mean()


@case(batch)
class IndexPut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x):
        h = self.a(x)
        table = torch.zeros(6, D)
        table[torch.tensor([0, 2, 4, 5])] = h
        table.scatter_add_(0, torch.zeros(1, D, dtype=torch.long), h[:1])
        return (table[[1, 0, 2]] * table[3:]).sum() + table.square().mean()


@case(batch)
class TiedEverywhere(nn.Module):
    """One weight under three names, one of them transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.b.weight = self.a.weight
        self.w = self.a.weight

    def forward(self, x):
        return (self.b(self.a(x).tanh()) @ self.w.t()).square().mean()


@case(batch)
class ParameterContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList(torch.randn(D, D) for _ in range(2))
        self.dict = nn.ParameterDict({"scale": torch.ones(D), "shift": torch.zeros(D)})

    def forward(self, x):
        for w in self.list:
            x = torch.tanh(x @ w) * self.dict["scale"] + self.dict["shift"]
        return x.square().mean()


@case(batch)
class AwkwardNames(nn.Module):
    """Names that the parallel module might want for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.program, self.mesh, self.train_ = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("count", torch.ones(D))
        self.register_buffer("constants", torch.ones(D))
        self.register_buffer("rank", torch.ones(D))

    def forward(self, x):
        h = self.train_(self.mesh(self.program(x)))
        return (h * self.count * self.constants * self.rank).square().mean()


@case(batch)
class PlainTensorAttribute(nn.Module):
    """A tensor that is neither parameter nor buffer, and a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(D, D), torch.linspace(0, 1, D)
        self.masks = [torch.ones(D), torch.arange(D) % 2]

    def forward(self, x):
        return (self.a(x) * self.scale + self.masks[1] * self.masks[0]).square().mean()


@case(batch)
class SubmoduleHooks(nn.Module):
    """Hooks on submodules change what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.a.register_forward_hook(lambda module, args, output: output * 2)
        self.b.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x):
        return self.b(self.a(x)).square().mean()


@case(batch)
class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x):
        h = self.a(x)
        values, order = h.sort(-1)
        return (
            values[:, -3:].sum() + h.kthvalue(2, -1).values.sum() + h.median() + h.gather(1, order)[:, 0].mean()
        ).tanh()


@case(batch)
class Einsums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(2, D, 4)), nn.Parameter(torch.randn(2, 4, 3))

    def forward(self, x):
        y = torch.einsum("bi,hio,hok->bhk", x, self.w, self.v)
        return torch.einsum("bhk,chk->bc", y, y).trace() + torch.tensordot(y, self.v, dims=([1, 2], [0, 2])).sum()


@case(batch)
class Pairwise(nn.Module):
    """All pairs by broadcasting, norms and distances."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.centers = nn.Linear(D, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        h = self.a(x)
        near = torch.cdist(h, self.centers).pow(2).mul(-1).softmax(-1)
        pairs = [F.cosine_similarity(h[i], h[j], dim=0) for i, j in itertools.combinations(range(3), 2)]
        return near.square().sum() + torch.stack(pairs).mean() + F.pdist(h).mean()


@case(lambda: call(floats(B, 6, D)))
class Unfolded(nn.Module):
    """Windows as strided views."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3 * D, D)

    def forward(self, x):
        windows = x.unfold(1, 3, 1).permute(0, 1, 3, 2).reshape(B, 4, 3 * D)
        return self.a(windows).square().mean()


@case(lambda: call(floats(B, D), ints(3, B)))
class ManyTypes(nn.Module):
    """Integers, flags and floats in one expression."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x, n):
        h = self.a(x)
        flags = (h > 0) & (n > 0).unsqueeze(1)
        return (h * flags + n.unsqueeze(1) // 2 - flags.long().cumsum(1) % 3).square().mean()


@case(batch)
class LinearAlgebra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(D) + 0.1 * torch.randn(D, D))

    def forward(self, x):
        gram = self.w @ self.w.t() + torch.eye(D)
        y = torch.linalg.solve(gram, x.t()).t()
        return y.square().mean() + 0.01 * torch.logdet(gram) + torch.linalg.matrix_norm(self.w, 2) * 0.01


@case(batch)
class OrthogonalWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.orthogonal(nn.Linear(D, D))

    def forward(self, x):
        return self.a(x).pow(3).mean()


@case(lambda: call(floats(2, D)))
class FewerThanDevices(nn.Module):
    """Dims smaller than the mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.b(self.a(x).relu()).square().mean()


@case(batch)
class EmptyTensors(nn.Module):
    """A dim of no elements, as batches without boxes have it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x):
        h = self.a(x)
        return torch.cat([h, h[:0]]).square().mean() + h[:, :0].sum()


@case(batch)
class KeyBias(nn.Module):
    """Gradients that are zero but for rounding: a key's bias, a bias in front of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.BatchNorm1d(D)

    def forward(self, x):
        return (self.norm(self.q(x)) @ self.k(x).t()).softmax(-1).square().mean()


@case(batch)
class DeepStack(nn.Module):
    """Deep enough to be folded, with a skip from the first layer to all others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(8))

    def forward(self, x):
        first = x
        for i, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x)) / (i + 1) + 0.1 * first
        return x.square().mean()
