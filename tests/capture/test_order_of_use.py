"""Code that goes over a set does so in another order in every process; the graph is the same."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from tapas.capture import capture
from tapas.ir.fold import fold
from tapas.ir.graph import Graph


class Kinds(nn.Module):
    """Of layers, each with a rotation and a mask made before all of them: `order` is that of a set."""

    def __init__(self, order: Sequence[str], layers: int = 6) -> None:
        super().__init__()
        self.order, self.reach = order, {"near": 2.0, "far": 9.0}
        for kind in ("near", "far"):
            self.register_buffer(kind, torch.linspace(0.1, self.reach[kind], 8))
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places, rotations, masks = tokens.cumsum(1), {}, {}
        for kind in self.order:
            rotations[kind] = self.rotation(places, kind)
            masks[kind] = places[:, :, None] - places[:, None, :] < self.reach[kind]
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            kind = ("near", "far", "near")[number % 3]
            x = layer(x, rotations[kind], masks[kind])
        return x.square().mean()

    def rotation(self, places: torch.Tensor, kind: str) -> torch.Tensor:
        return (places[..., None] * getattr(self, kind)).cos()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + mask.to(x.dtype) @ (self.linear(x) * rotation)


def wiring(graph: Graph) -> list[object]:
    """Operators and what they read, by the order in which that is made; names of results tell it, too."""
    made = {name: number for number, name in enumerate(name for op in graph.ops for name in op.results)}
    read = [[made.get(name, name) for name in op.operands] for op in graph.ops]
    return [(op.target, str(op.args), names) for op, names in zip(graph.ops, read, strict=True)]


@pytest.mark.parametrize("layers", [2, 6])  # traced one by one, and one for all
def test_kinds_in_either_order(layers: int) -> None:
    tokens = {"tokens": torch.randint(0, 10, (4, 6))}
    one, other = (
        capture(Kinds(order, layers), tokens, check_fold=True) for order in (("near", "far"), ("far", "near"))
    )
    assert wiring(one) == wiring(other)
    assert fold(one).copies == fold(other).copies
