"""Collectives along one mesh axis, on flat leading dims, and a count of what they send.

Plain ones: torch's functional collectives take six times as long to call, and what `torch.compile` could trace
of them it does not see (see moves.py).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tapas.runtime.draws import Draws


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


@dataclass(frozen=True)
class Rank:
    """Where a program runs."""

    mesh: tuple[int, ...]
    coord: tuple[int, ...]
    wires: Sequence[Axis]
    count: Count
    device: torch.device
    draws: Draws = field(default_factory=Draws)


class GroupAxis:
    """An axis that is a process group."""

    def __init__(self, group: Any) -> None:
        self.group, self.size, self.index = group, dist.get_world_size(group), dist.get_rank(group)

    def all_reduce(self, x: torch.Tensor, how: str = "sum") -> torch.Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how], self.group)
        return y

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        _renamed("all_gather_single", "all_gather_into_tensor")(y, x.contiguous(), group=self.group)
        return y

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        _renamed("reduce_scatter_single", "reduce_scatter_tensor")(y, x.contiguous(), group=self.group)
        return y

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        y = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(y, x.contiguous(), received, sent, group=self.group)
        return y


@cache
def _renamed(now: str, before: str) -> Any:
    """A collective that has had another name up to 2.11."""
    return getattr(dist, now, None) or getattr(dist, before)


def mesh_axes(device_mesh: Any) -> list[Axis]:
    """The axes of a torch DeviceMesh."""
    return [GroupAxis(device_mesh.get_group(dim)) for dim in range(device_mesh.ndim)]


_gradient_groups: "WeakKeyDictionary[Any, tuple[Any, dict]]" = WeakKeyDictionary()  # mesh -> all processes, groups


class GradientGroups:
    """Process groups for gradients only, over one or several axes: they need not wait for other traffic.

    Making a group takes all processes there are. Where some of them are not in the mesh, gradients share the
    groups of its axes.
    """

    def __init__(self, device_mesh: Any, coord: Sequence[int]) -> None:
        self.mesh, self.coord = device_mesh, tuple(coord)
        self.all_here = device_mesh.size() == dist.get_world_size()
        everyone, groups = _gradient_groups.get(device_mesh, (None, {}))
        if everyone is not dist.group.WORLD:  # made before the processes met anew
            groups = {}
            _gradient_groups[device_mesh] = dist.group.WORLD, groups
        self.groups: dict[tuple[str, tuple[int, ...]], Any] = groups

    def add(self, kind: str, axes: tuple[int, ...]) -> None:
        """All ranks have to add the same in the same order."""
        if (kind, axes) not in self.groups:
            if self.all_here:
                self.groups[kind, axes] = self._made(axes)
            elif len(axes) == 1:
                self.groups[kind, axes] = self.mesh.get_group(axes[0])

    def _made(self, axes: tuple[int, ...]) -> Any:
        mine = None
        others = [range(1) if a in axes else range(n) for a, n in enumerate(self.mesh.shape)]
        for place in product(*others):
            where = tuple(slice(None) if a in axes else i for a, i in enumerate(place))
            group = dist.new_group(self.mesh.mesh[where].flatten().tolist())
            if all(a in axes or i == self.coord[a] for a, i in enumerate(place)):
                mine = group
        return mine

    def sum(self, axes: tuple[int, ...], flat: torch.Tensor) -> Any:
        """Begin to sum a tensor in place; wait() on what is returned."""
        return dist.all_reduce(flat, group=self.groups["all_reduce", axes], async_op=True)

    def scatter(self, axis: int, flat: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Begin to sum a tensor and keep this rank's part of it; wait() on what is returned first."""
        group = self.groups["reduce_scatter", (axis,)]
        part = flat.new_empty((flat.shape[0] // dist.get_world_size(group), *flat.shape[1:]))
        start = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
        return start(part, flat, group=group, async_op=True), part
