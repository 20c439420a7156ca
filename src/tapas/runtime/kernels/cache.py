"""Writing to a cache whose places are dealt out: each rank writes what is its own, and asks no device where that is."""

import torch

from tapas.ir.custom_ops import CACHES
from tapas.rules.base import Local
from tapas.runtime.kernels.common import Comms, localize


def write(local: Local, comms: Comms, held: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    place, mine = localize(places, local.operand_pieces(0, 2))
    count = held.shape[2]
    if not count:
        return held
    if len(places) == 1:  # another rank's row leaves what is there
        rows = torch.where(mine.view(1, 1, -1, 1), rows, held.index_select(2, place))
        return CACHES["tapas.write_cache.default"](held, rows, place)
    # which row each place gets, and behind them what gets those of others
    row = torch.full((count + 1,), -1, device=held.device).index_copy_(
        0, torch.where(mine, place, count), torch.arange(len(places), device=held.device)
    )[:count]
    return held.copy_(torch.where((row >= 0).view(1, 1, -1, 1), rows.index_select(2, row.clamp(min=0)), held))
