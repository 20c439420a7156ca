"""What is sent beside the computation: weights ahead of it, gradients behind it.

It has process groups of its own, so that it need not wait for the moves of activations, nor they for it; and on a GPU
a stream, so that packing and unpacking do not stand in the way of operators either. Tensors that travel together are
one collective: each of them is sent from where it lies, and arrives where it belongs.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tapas._torch import gather_together, in_backward, no_dispatch_modes, scatter_together, sum_together, timeout_of
from tapas.errors import TapasError
from tapas.runtime.collectives import Axes, Axis, Count, Done, Members, Passing, sendable
from tapas.runtime.lost_ranks import Sent, collective_failed, site_of_parameters

_groups: "WeakKeyDictionary[Any, tuple[Any, dict]]" = WeakKeyDictionary()  # mesh -> all processes, groups by purpose


class SideGroups:
    """As process groups. Making one takes all processes there are: where some of them are not in the mesh, the groups
    of its axes are used."""

    def __init__(self, device_mesh: Any, coord: Sequence[int], count: Count, purpose: str = "") -> None:
        """Those of another purpose are others, so that what is sent in one does not wait for the other."""
        self.mesh, self.coord, self.count, self.purpose = device_mesh, tuple(coord), count, purpose
        self.paths: Sequence[str] = ()  # of parameters, by number
        self.joint = device_mesh.size() == dist.get_world_size()
        everyone, groups = _groups.get(device_mesh, (None, {}))
        if everyone is not dist.group.WORLD:  # made before the processes met anew
            groups = {}
            _groups[device_mesh] = dist.group.WORLD, groups
        self.groups: dict[tuple[str, Axes], Any] = groups.setdefault(purpose, {})

    def add(self, kind: str, axes: Axes) -> None:
        if (kind, axes) not in self.groups:
            if self.joint:
                self.groups[kind, axes] = self._made(axes)
            elif len(axes) == 1:
                self.groups[kind, axes] = self.mesh.get_group(axes[0])

    def _made(self, axes: Axes) -> Any:
        mine = None
        timeout = timeout_of(dist.group.WORLD, self.mesh.device_type)
        others = [range(1) if a in axes else range(n) for a, n in enumerate(self.mesh.shape)]
        for place in product(*others):
            where = tuple(slice(None) if a in axes else i for a, i in enumerate(place))
            group = dist.new_group(self.mesh.mesh[where].flatten().tolist(), timeout=timeout)
            if all(a in axes or i == self.coord[a] for a, i in enumerate(place)):
                mine = group
        return mine

    def sum(self, axes: Axes, tensors: Sequence[torch.Tensor], of: Members) -> Any:
        group = self.groups["all_reduce", axes]
        alone = partial(dist.all_reduce, tensors[0], group=group, async_op=True)  # gloo copies what it sums together
        start = partial(sum_together, group, tensors) if len(tensors) > 1 else alone
        return Watched(start, self, "all_reduce", axes, tensors, of)

    def gather(self, axes: Axes, wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], of: Members) -> Any:
        sent = [[*map(sendable, tensors)] for tensors in (wholes, parts)]
        start = partial(gather_together, self.groups["all_gather", axes], *sent)
        return Watched(start, self, "all_gather", axes, wholes, of)

    def scatter(self, axes: Axes, parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], of: Members) -> Any:
        start = partial(scatter_together, self.groups["reduce_scatter", axes], parts, wholes)
        return Watched(start, self, "reduce_scatter", axes, wholes, of)


class Watched:
    """A collective of side groups. If it fails, it says what it was."""

    def __init__(
        self, start: Callable[[], Any], side: SideGroups, kind: str, axes: Axes, sent: Sequence[torch.Tensor],
        of: Members,
    ) -> None:  # fmt: skip
        self.side, self.kind, self.axes, self.sent, self.of = side, kind, axes, sent, of
        self.number = side.count.number
        try:
            self.work = start()
        except RuntimeError as error:
            raise self._explained(error) from error

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self._explained(error) from error
        self.sent, self.of = (), ()  # whoever started it may want their memory back

    def get_future(self) -> Any:
        """Of its end, for recorders. Not all works have one."""
        return self.work.get_future()

    def _explained(self, error: Exception) -> TapasError:
        place, phase = self._place()
        nbytes = sum(x.numel() * x.element_size() for x in self.sent)
        sent = Sent(place, self.kind, self.axes, nbytes, phase, self.number)
        return collective_failed(sent, dist.get_process_group_ranks(self.side.groups[self.kind, self.axes]), error)

    def _place(self) -> tuple[str, str]:
        """Where in the model it belongs, and in which pass."""
        if isinstance(self.of, Passing):
            return self.of.site.within(self.of.path), self.of.phase
        paths = [of if isinstance(of, str) else self.side.paths[of] for of in self.of]
        gathered = self.kind == "all_gather"
        place = f"{'weights' if gathered else 'gradients'} of {site_of_parameters(paths)}"
        return place, "forward" if gathered and not in_backward() else "backward"


class SideAxes:
    """Over the axes of a rank, one after the other, at once: for ranks that have no process groups."""

    joint = True

    def __init__(self, wires: Sequence[Axis]) -> None:
        self.wires = wires

    def add(self, kind: str, axes: Axes) -> None:
        pass

    def sum(self, axes: Axes, tensors: Sequence[torch.Tensor], of: Members) -> Any:
        with no_dispatch_modes():
            for x in tensors:
                for axis in axes:
                    x.copy_(self.wires[axis].all_reduce(x))
        return Done()

    def gather(self, axes: Axes, wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], of: Members) -> Any:
        with no_dispatch_modes():  # process groups need no memory that a program could see
            for whole, part in zip(wholes, parts, strict=True):
                for axis in reversed(axes):
                    part = self.wires[axis].all_gather(part)
                whole.copy_(part.view(whole.shape))
        return Done()

    def scatter(self, axes: Axes, parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], of: Members) -> Any:
        with no_dispatch_modes():
            for part, whole in zip(parts, wholes, strict=True):
                for axis in axes:
                    whole = self.wires[axis].reduce_scatter(whole)
                part.copy_(whole.view(part.shape))
        return Done()


class UnderWay:
    """Something that is done beside the computation, up to a point where it waits for others, again and again."""

    def __init__(self, work: Iterator[None], stream: Any, read: Sequence[torch.Tensor]) -> None:
        """`read`: memory of the computation's, which it must not use for anything else in the meantime."""
        self.work, self.event, self.read = work, None, read
        if stream is None:
            self.read = ()
            next(work, None)
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))  # memory may be in use there
        with torch.cuda.stream(stream):
            for _ in work:  # streams wait, not the host
                pass
        self.event = stream.record_event()

    def wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
            self.read = ()
        else:
            for _ in self.work:
                pass


class SideStream:
    """A stream beside that of the computation, where the device has streams."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, work: Iterator[None], read: Sequence[torch.Tensor] = ()) -> UnderWay:
        return UnderWay(work, self.stream, read)
