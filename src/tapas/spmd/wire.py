"""Collectives along one mesh axis, on flat leading dims, and a count of what they send.

The only module that uses torch's functional collectives: they are not documented as public, but they are
what `torch.compile` traces, and nothing else in stock PyTorch does both.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch


@dataclass
class Count:
    """What one rank sent: bytes by phase, collective and axes."""

    forward: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)
    backward: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)

    def add(self, phase: str, kind: str, axes: tuple[int, ...], nbytes: int) -> None:
        (self.forward if phase == "forward" else self.backward)[kind, axes] += nbytes

    def clear(self) -> None:
        self.forward.clear()
        self.backward.clear()


class Axis(Protocol):
    """The ranks that differ along one axis only, as seen by one of them."""

    size: int
    index: int

    def all_reduce(self, x: torch.Tensor, how: str = "sum") -> torch.Tensor: ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[k, ...] on every rank -> [size * k, ...]."""
        ...

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[size * k, ...] on every rank -> [k, ...]."""
        ...

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor: ...


class GroupAxis:
    """An axis that is a process group."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self.group, self.size, self.index = group, dist.get_world_size(group), dist.get_rank(group)

    def all_reduce(self, x: torch.Tensor, how: str = "sum") -> torch.Tensor:
        f = _functional()
        return f.wait_tensor(f.all_reduce(x.contiguous(), how, self.group))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        f = _functional()
        gather = getattr(f, "all_gather_single", None) or f.all_gather_tensor  # renamed after 2.11
        return f.wait_tensor(gather(x.contiguous(), 0, self.group))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        f = _functional()
        scatter = getattr(f, "reduce_scatter_single", None) or f.reduce_scatter_tensor
        return f.wait_tensor(scatter(x.contiguous(), "sum", 0, self.group))

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        f = _functional()
        return f.wait_tensor(f.all_to_all_single(x.contiguous(), received, sent, self.group))


@cache
def _functional() -> Any:
    import torch.distributed._functional_collectives as functional

    return functional


def mesh_axes(device_mesh: Any) -> list[Axis]:
    """The axes of a torch DeviceMesh."""
    return [GroupAxis(device_mesh.get_group(dim)) for dim in range(device_mesh.ndim)]


class GradientGroups:
    """Process groups for gradients only, over one or several axes: they need not wait for other traffic."""

    def __init__(self, device_mesh: Any, coord: Sequence[int]) -> None:
        self.ranks, self.coord = device_mesh.mesh, tuple(coord)
        self.groups: dict[tuple[int, ...], Any] = {}

    def add(self, axes: tuple[int, ...]) -> None:
        """All members have to add the same axes in the same order."""
        import torch.distributed as dist

        if axes not in self.groups:
            place = tuple(slice(None) if a in axes else i for a, i in enumerate(self.coord))
            members = self.ranks[place].flatten().tolist()
            self.groups[axes] = dist.new_group(members, use_local_synchronization=True)

    def start(self, axes: tuple[int, ...], flat: torch.Tensor) -> Any:
        """Begin to sum a tensor in place."""
        import torch.distributed as dist

        return dist.all_reduce(flat, group=self.groups[axes], async_op=True)
