"""Stored layouts in DTensor's words, and the part of a tensor that a rank holds."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tapas._torch import strided_shard
from tapas.sharding.layout import Layout, State, local_pieces


def placement(state: State) -> Placement:
    """A stored state as DTensor says it."""
    if not state.sharded:
        return Replicate()
    return strided_shard(state.dim, len(state.tiling)) if state.tiling else Shard(state.dim)


def shard(x: torch.Tensor, layout: Layout, mesh: Sequence[int], coord: Sequence[int]) -> torch.Tensor:
    """What the rank at `coord` holds of a whole tensor."""
    for dim, ranges in enumerate(local_pieces(x.shape, layout, mesh, coord)):
        if ranges != ((0, x.shape[dim]),):
            parts = [x.narrow(dim, start, stop - start) for start, stop in ranges]
            x = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return x
