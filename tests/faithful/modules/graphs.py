"""Graph networks: messages along edges."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats, ints

N, M, D = 8, 16, 8


def graph():
    return call(floats(N, D), ints(N, 2, M))


@case(graph)
class GraphConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x, edge_index):
        source, target = edge_index
        degree = torch.zeros(N).scatter_add_(0, target, torch.ones(M)).clamp(min=1)
        h = torch.zeros(N, D).index_add(0, target, self.lin(x)[source])
        return F.relu(h / degree.unsqueeze(1)).square().mean()


@case(graph)
class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.a, self.b = nn.Linear(D, D), nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))

    def forward(self, x, edge_index):
        source, target = edge_index[0], edge_index[1]
        h = self.lin(x)
        score = F.leaky_relu((h @ self.a)[source] + (h @ self.b)[target]).exp()
        total = torch.zeros(N).index_add_(0, target, score) + 1e-9
        y = torch.zeros_like(h).index_add_(0, target, h[source] * (score / total[target]).unsqueeze(-1))
        return y.square().mean()


@case(lambda: call(floats(2, N, D), (torch.rand(2, N, N) < 0.4).to(torch.get_default_dtype())))
class DenseGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, adjacency):
        adjacency = adjacency + torch.eye(N)
        d = adjacency.sum(-1).rsqrt()
        h = torch.relu(d.unsqueeze(-1) * (adjacency @ (d.unsqueeze(-1) * self.a(x))))
        return self.b(h).amax(1).square().mean()


@case(graph)
class MaxAggregation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2 * D, D)

    def forward(self, x, edge_index):
        source, target = edge_index
        message = self.lin(torch.cat([x[source], x[target] - x[source]], -1))
        index = target.unsqueeze(-1).expand_as(message)
        y = torch.zeros_like(x).scatter_reduce(0, index, message, "amax", include_self=False)
        return y.square().mean()
