"""Grouped matrix products and experts, each rank with some of the experts or some of the rows."""

import torch

from tapas.rules.base import Local
from tapas.runtime.kernels.common import Comms, Reader, localize, nothing


def grouped_mm(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    """Rows come sorted by expert; `offs` says where each expert's rows end, of all rows and experts."""
    x, weight, ends = operands
    if x.numel() == 0 or weight.numel() == 0:
        return nothing(local, operands)
    if local.axes_of("t"):
        pieces = local.operand_pieces(0, 0)
        ends = torch.stack([ends.clamp(start, stop) - start for start, stop in pieces]).sum(0, dtype=ends.dtype)
    if not local.axes_of("e"):
        return Reader(local, (x, weight, ends)).run()
    found, offset = nothing(local, operands), 0
    for first, last in local.operand_pieces(1, 0):
        if first < last:
            found = found + _share(local, x, weight[offset : offset + last - first], ends, first, last)
        offset += last - first
    return found


def _share(
    local: Local, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, first: int, last: int
) -> torch.Tensor:
    """The rows of experts first:last; zero elsewhere.

    Own rows go to the front without asking the device how many they are; what lies behind them is
    left alone by the product, so it may be anything and is masked on the way in and out.
    """
    begin = ends[first - 1] if first else torch.zeros_like(ends[0])
    rows = torch.arange(x.shape[0], device=x.device)
    mine = (rows < ends[last - 1] - begin).unsqueeze(-1)
    front = x.index_select(0, (rows + begin) % x.shape[0]).masked_fill(~mine, 0)
    made = Reader(local, (front, weight, ends[first:last] - begin)).run().masked_fill(~mine, 0)
    return made.index_select(0, (rows - begin) % x.shape[0])


def experts(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    """Some of the experts: tokens of the others are skipped, as the operator does with foreign numbers."""
    read = Reader(local, operands)
    if any(x.numel() == 0 for x in operands):
        return nothing(local, operands)
    place, mine = localize(read("index"), local.operand_pieces(3, 0))
    return read.run(index=torch.where(mine, place, -1))
