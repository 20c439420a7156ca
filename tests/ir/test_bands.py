"""Masks that are windows are told by what makes them, and nothing else is taken for one."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapas.capture import capture
from tapas.capture.passes.window_masks import ATTENTION, WINDOW
from tapas.ir.bands import Band
from tapas.ir.graph import BLOCK
from tapas.ir.inline import unfold
from tapas.ir.interpreter import leaf_values, run

Mask = Callable[[Tensor, Tensor], Tensor]
LENGTH = 8


class Masked(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[-2], device=x.device)
        mask = self.mask(places[:, None], places[None, :])
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


MASKS: list[tuple[Mask, Band | None]] = [
    (lambda q, k: (k <= q) & (k > q - 3), Band(2, 0)),
    (lambda q, k: (q >= k) & (q - k < 3), Band(2, 0)),
    (lambda q, k: (k - q <= 1) & (k + 2 >= q), Band(2, 1)),
    (lambda q, k: ((k <= q) & (k > q - 3) & (k > q - 5)).expand(2, 1, LENGTH, LENGTH), Band(2, 0)),
    (lambda q, k: torch.full((), True, dtype=torch.bool) & (k <= q) & (k > q - 2), Band(1, 0)),
    (lambda q, k: k <= q, None),  # looks back as far as there is anything
    (lambda q, k: (k <= q) & (k > q - 20), None),
    (lambda q, k: (k < q) & (k > q - 3), None),  # the first one sees nothing
    (lambda q, k: ((k <= q) & (k > q - 3)) | (k == 0), None),
    (lambda q, k: ((k <= q) & (k > q - 3)) & (k + q < 9), None),
    (lambda q, k: (2 * k <= q + 2) & (k > q - 3), None),
    (lambda q, k: (k <= q) & (k > q - 3) & (k < 6), None),
    (lambda q, k: ((k <= q) & (k > q - 3)).to(torch.float64), None),
]


@pytest.mark.parametrize(("mask", "band"), MASKS)
def test_windows(mask: Mask, band: Band | None) -> None:
    x = torch.randn(2, 3, LENGTH, 4, dtype=torch.float64)
    model = Masked(mask)
    graph = capture(model, (x,), training=False)
    (op,) = (op for op in graph.ops if "attention" in op.target)
    assert (op.target, op.args[3:]) == ((WINDOW, tuple(band)) if band else (ATTENTION, op.args[3:]))
    assert bool(graph.prelude) == (band is None)  # nobody reads what made it
    (made,) = run(graph, leaf_values(graph, model, {"x": x}))
    assert torch.equal(made, model(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.up(x)
        return x + F.scaled_dot_product_attention(y, y, y, attn_mask=mask)


class Layers(nn.Module):
    """Copies of one layer that are given one of two windows, or read the mask besides."""

    def __init__(self, windows: tuple[int, ...], also: bool = False) -> None:
        super().__init__()
        self.layers, self.windows, self.also = nn.ModuleList(Layer() for _ in windows), windows, also

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        places = torch.arange(x.shape[-2], device=x.device)
        for layer, window in zip(self.layers, self.windows, strict=True):
            mask = (places <= places[:, None]) & (places > places[:, None] - window)
            x = layer(x, mask)
        return {"loss": x.square().mean() + (mask.sum() if self.also else 0)}


@pytest.mark.parametrize(("windows", "also", "masks"), [
    ((3, 3, 3, 3), False, 0), ((3, 3, 3, 3), True, 1), ((3, 3, 2, 2), False, 0), ((20, 20, 20, 20), False, 1),
])  # fmt: skip
def test_layers_that_are_copies(windows: tuple[int, ...], also: bool, masks: int) -> None:
    """They stay copies if all of them are given the same window."""
    model, x = Layers(windows, also), torch.randn(2, 3, LENGTH, 4)
    graph = capture(model, (x,), check_fold=True)
    assert any(op.target == BLOCK for op in graph.ops) == (len({*windows}) == 1)
    targets = {op.target for op in unfold(graph).ops if "attention" in op.target}
    assert targets == {WINDOW if windows[0] < LENGTH else ATTENTION}
    assert sum(leaf.kind == "constant" for leaf in graph.leaves) == masks
