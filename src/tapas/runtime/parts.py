"""A rank's part of what is whole, DTensors, and how inputs in any of these forms become what a program takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tapas._torch import strided_shard, whole_tensor
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
    """What a rank reads of a tensor that everyone has whole. Where a gradient comes back, everyone gets all of it."""

    def __init__(self, layout: Layout, rank: Rank) -> None:
        super().__init__()
        self.layout, self.rank = layout, rank
        # of a partial sum one rank keeps the value, the others hold zeros
        self.keeps = not any(state.kind == "P" and i for state, i in zip(layout, rank.coord, strict=True))

    @torch.compiler.disable  # a view, or a few: not worth compiling
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return _CutWithGradient.apply(x, self)  # type: ignore[return-value]
        return self.part(x)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        part = shard(x, self.layout, self.rank.mesh, self.rank.coord)
        return part if self.keeps else torch.zeros_like(part)

    def whole_gradient(self, gradient: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """From all ranks' gradients of their parts."""
        whole = gradient.new_zeros(shape)
        pieces = local_pieces(shape, self.layout, self.rank.mesh, self.rank.coord)
        rows = [torch.cat([torch.arange(*piece) for piece in ranges]).to(gradient.device) for ranges in pieces]
        whole[torch.meshgrid(*rows, indexing="ij") if rows else ()] = gradient
        for axis, state in enumerate(self.layout):
            if state.kind in "SB":  # what others read, or did with it, is missing here
                self.rank.count.add("backward", "all_reduce", (axis,), whole.numel() * whole.element_size())
                whole = self.rank.wires[axis].all_reduce(whole)
        return whole


class _CutWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cut: Cut) -> torch.Tensor:
        ctx.cut, ctx.shape = cut, x.shape
        return cut.part(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.cut.whole_gradient(gradients[0], ctx.shape), None


@dataclass(frozen=True)
class Input:
    """One input of a program."""

    name: str
    shape: tuple[int, ...]  # of the whole
    cut: Cut | None  # None: the program takes it whole
    part: tuple[int, ...]  # the shape of what the program takes
    trained: bool  # a gradient comes back

    def take(self, value: torch.Tensor, device: torch.device, parts: bool) -> torch.Tensor:
        """What the program takes; `parts`: plain tensors are what it takes already."""
        if not self.trained:
            value = value.detach()
        elif value.requires_grad and (parts or isinstance(value, DTensor)) and torch.is_grad_enabled():
            fact = "requires a gradient, and is given in parts"
            raise TapasError(self.name, fact, "give the whole tensor on every rank, or detach it")
        if isinstance(value, DTensor):
            if self.cut is not None and list(value.placements) == [placement(s.value) for s in self.cut.layout]:
                return value.to_local()
            value = whole_tensor(value)
        elif parts:
            return value.to(device)
        value = value.to(device)
        return self.cut(value) if self.cut is not None else value
