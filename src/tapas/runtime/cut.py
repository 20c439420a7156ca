"""What a rank reads of a tensor that everyone has whole."""

from collections.abc import Sequence

import torch
from torch import nn

from tapas.runtime.redistribute import Conversion, convert
from tapas.sharding.layout import Layout, R


class Cut(nn.Module):
    def __init__(self, conversions: Sequence[Conversion], layout: Layout) -> None:
        super().__init__()
        self.conversions, self.layout = tuple(conversions), layout

    @torch.compiler.disable  # a view, or a few: not worth compiling
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conversion in self.conversions:
            x = conversion(x, (), "forward", None)
        return x


def cut_of(shape: Sequence[int], layout: Layout, mesh: Sequence[int], coord: Sequence[int]) -> Cut:
    """From whole to a layout of plain states (no B: this is about values)."""
    now, conversions = [R] * len(layout), []
    for axis, state in enumerate(layout):
        if state != R:
            conversions.append(convert(shape, tuple(now), (axis,), R, state, mesh, coord))
            now[axis] = state
    return Cut(conversions, layout)
