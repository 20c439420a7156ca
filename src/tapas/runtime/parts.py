"""A rank's part of what is whole, DTensors, and how inputs in any of these forms become what a program takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tapas._torch import strided_shard
from tapas.errors import TapasError
from tapas.runtime.collectives import Rank
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


class Cut(nn.Module):
    """What a rank reads of a tensor that everyone has whole, in a layout of plain states (no B: this is about
    values)."""

    def __init__(self, layout: Layout, rank: Rank) -> None:
        super().__init__()
        self.layout, self.rank = layout, rank
        # of a partial sum one rank keeps the value, the others hold zeros
        self.keeps = not any(state.kind == "P" and i for state, i in zip(layout, rank.coord, strict=True))

    @torch.compiler.disable  # a view, or a few: not worth compiling
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = shard(x, self.layout, self.rank.mesh, self.rank.coord)
        return part if self.keeps else torch.zeros_like(part)


@dataclass(frozen=True)
class Input:
    """One input of a program."""

    shape: tuple[int, ...]  # of the whole
    cut: Cut | None  # None: the program takes it whole
    part: tuple[int, ...]  # the shape of what the program takes

    def take(self, value: torch.Tensor, device: torch.device, parts: bool) -> torch.Tensor:
        """What the program takes; `parts`: plain tensors are what it takes already."""
        if isinstance(value, DTensor):
            if self.cut is not None and list(value.placements) == [placement(s.value) for s in self.cut.layout]:
                return value.to_local()
            value = value.full_tensor()
        elif parts:
            return value.to(device)
        value = value.to(device)
        return self.cut(value) if self.cut is not None else value


def named(names: Sequence[str], order: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All inputs by name; `order` is that of the original's positional arguments."""
    given = dict(zip(order, args, strict=False))
    if len(args) > len(order):
        raise TapasError("inputs", f"{len(args)} are given, the model takes {len(order)}", f"give {', '.join(names)}")
    if twice := sorted(given.keys() & kwargs.keys()):
        raise TapasError(", ".join(twice), "given by position and by name", "give each input once")
    given = {name: value for name, value in (given | dict(kwargs)).items() if value is not None or name in names}
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise TapasError(", ".join(unknown), "not an input that was captured", f"give {', '.join(names)}")
    missing = [name for name in names if given.get(name) is None]
    if missing:
        raise TapasError(", ".join(missing), "missing", f"the plan was made for {', '.join(names)}")
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise TapasError(name, f"is a {type(value).__name__}", "give a tensor")
        if value.requires_grad and torch.is_grad_enabled():
            raise TapasError(name, "requires a gradient", "gradients of inputs are not supported: detach it")
    return given
