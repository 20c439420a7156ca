"""Collectives along one mesh axis, on flat leading dims, and a count of what they send.

Plain ones: torch's functional collectives take six times as long to call, and what `torch.compile` could trace
of them it does not see (see moves.py).
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tapas.runtime.draws import Draws
from tapas.runtime.lost_ranks import Journal, Site, WireFailed


@dataclass
class Count:
    """What one rank sent, by collective and axes: bytes and how many messages; and how often it copied a tensor into a
    buffer or out of one."""

    forward: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)
    backward: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)
    launches: Counter[tuple[str, str, tuple[int, ...]]] = field(default_factory=Counter)  # by phase, too
    copies: Counter[str] = field(default_factory=Counter)  # by phase
    # of rows that are at home elsewhere and came to be worked on, by phase and axes: how many depends on data
    visits: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)
    strided: Counter[str] = field(default_factory=Counter)  # of what, strides had a say in whether it was copied
    number = 0  # of collectives, ever: no field, for it is not cleared

    def add(self, phase: str, kind: str, axes: tuple[int, ...], nbytes: int) -> None:
        self.number += 1
        (self.forward if phase == "forward" else self.backward)[kind, axes] += nbytes
        self.launches[phase, kind, axes] += nbytes > 0

    def copied(self, phase: str, before: torch.Tensor, after: torch.Tensor) -> None:
        """If what is in a buffer is not the tensor's own memory."""
        self.copies[phase] += before.untyped_storage().data_ptr() != after.untyped_storage().data_ptr()
        self.strided[phase] += not before.is_contiguous()

    def copy(self) -> "Count":
        return Count(*(getattr(self, counter.name).copy() for counter in fields(self)))

    def clear(self) -> None:
        for counter in fields(self):
            getattr(self, counter.name).clear()


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

    def pass_on(self, parts: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> Any:
        """To the next rank, the last one's to the first; `arriving` comes from the one before. wait() on what is
        returned. Neither may be touched meanwhile."""
        ...


@dataclass(frozen=True)
class Passing:
    """An activation or its gradient, on its way."""

    site: Site
    path: str | None  # of the copy of a block in which it happens, if that is known
    phase: str


Axes = tuple[int, ...]
Members = Collection[str | int] | Passing  # what travels together: parameters, by path or number


class Side(Protocol):
    """Collectives over one or several axes, whose ranks are numbered outer axis major. wait() on what is returned."""

    joint: bool  # whether several axes can be gone over at once

    def add(self, kind: str, axes: Axes) -> None:
        """All ranks have to add the same in the same order, before it is used."""
        ...

    def sum(self, axes: Axes, tensors: Sequence[torch.Tensor], of: Members) -> Any:
        """Each of some tensors, in place. `of`: the parameters whose gradients these are."""
        ...

    def gather(self, axes: Axes, wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], of: Members) -> Any:
        """[k, ...] on every rank -> [size * k, ...], for each of some tensors."""
        ...

    def scatter(self, axes: Axes, parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], of: Members) -> Any:
        """[size * k, ...] on every rank -> [k, ...] of their sum, for each of some tensors."""
        ...


@dataclass(frozen=True)
class Rank:
    """Where a program runs."""

    mesh: tuple[int, ...]
    coord: tuple[int, ...]
    wires: Sequence[Axis]
    count: Count
    device: torch.device
    draws: Draws = field(default_factory=Draws)
    journal: Journal = field(default_factory=Journal)
    side: Side | None = None  # for activations that travel in pieces


SENT = frozenset((
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.int8, torch.uint8, torch.bool,
))  # fmt: skip


def sendable(x: torch.Tensor) -> torch.Tensor:
    """What is copied and not summed, as numbers that backends send: not all know float8 and short integers."""
    return x if x.dtype in SENT else x.unsqueeze(-1).view(torch.uint8)


class GroupAxis:
    """An axis that is a process group."""

    def __init__(self, group: Any) -> None:
        self.group, self.size, self.index = group, dist.get_world_size(group), dist.get_rank(group)

    def all_reduce(self, x: torch.Tensor, how: str = "sum") -> torch.Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        try:
            dist.all_reduce(y, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how], self.group)
        except RuntimeError as error:
            raise WireFailed("all_reduce", self.group, error) from error
        return y

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        try:
            gather = _renamed("all_gather_single", "all_gather_into_tensor")
            gather(sendable(y), sendable(x.contiguous()), group=self.group)
        except RuntimeError as error:
            raise WireFailed("all_gather", self.group, error) from error
        return y

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        try:
            _renamed("reduce_scatter_single", "reduce_scatter_tensor")(y, x.contiguous(), group=self.group)
        except RuntimeError as error:
            raise WireFailed("reduce_scatter", self.group, error) from error
        return y

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        y = x.new_empty((sum(received), *x.shape[1:]))
        try:
            dist.all_to_all_single(sendable(y), sendable(x.contiguous()), received, sent, group=self.group)
        except RuntimeError as error:
            raise WireFailed("all_to_all", self.group, error) from error
        return y

    def pass_on(self, parts: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> Any:
        after, before = (dist.get_global_rank(self.group, (self.index + step) % self.size) for step in (1, -1))
        sends = [dist.P2POp(dist.isend, x, after, self.group) for x in parts if x.numel()]
        receives = [dist.P2POp(dist.irecv, y, before, self.group) for y in arriving if y.numel()]
        try:
            return _OnWire(self.group, dist.batch_isend_irecv([*sends, *receives]) if sends else [])
        except RuntimeError as error:
            raise WireFailed("ring", self.group, error) from error


class _OnWire:
    """Messages between two ranks, all of them."""

    def __init__(self, group: Any, works: Sequence[Any]) -> None:
        self.group, self.works = group, works

    def wait(self) -> None:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise WireFailed("ring", self.group, error) from error


class Done:
    """What has arrived where it was sent."""

    def wait(self) -> None:
        pass


@cache
def _renamed(now: str, before: str) -> Any:
    """A collective that has had another name up to 2.11."""
    return getattr(dist, now, None) or getattr(dist, before)


def mesh_axes(device_mesh: Any) -> list[Axis]:
    """The axes of a torch DeviceMesh."""
    return [GroupAxis(device_mesh.get_group(dim)) for dim in range(device_mesh.ndim)]
