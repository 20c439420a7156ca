"""Gradients on their way from the backward pass to the parameters.

Nothing waits for them before the optimizer does, so what they have to send is sent while the backward pass
goes on computing, in process groups of their own and always in the same order. Those of whole weights, which
are summed over some axes, are packed into few large messages, each sent as soon as its last gradient is there.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from tapas._torch import (
    accumulation_hooks,
    gradient_hooks,
    in_backward,
    like_parameter,
    local_part,
    storage_holders,
    when_backward_ends,
    whole_tensor,
)
from tapas.cost.collectives import BUCKET_BYTES
from tapas.errors import TapasError
from tapas.runtime.collectives import Count
from tapas.runtime.moves import Step
from tapas.runtime.redistribute import Conversion
from tapas.runtime.side_groups import Axes, Side, SideStream, UnderWay

Key = TypeVar("Key", bound=Hashable)
PARTS = 8  # a small model's gradients go in about so many messages, or all would leave at the very end
LEAST = 1_000_000  # bytes: but not in smaller ones than this


@dataclass
class Bucket:
    """Parameters whose gradients travel together."""

    axes: Axes
    members: dict[int, torch.Size] = field(default_factory=dict)  # and the shapes of this rank's parts of them
    flat: torch.Tensor | None = None  # what will be sent, and in it
    places: dict[int, torch.Tensor] = field(default_factory=dict)  # where the members' gradients belong,
    ready: set[int] = field(default_factory=set)  # and whose are there
    sent: int = 0  # how often, in this backward pass

    def empty(self) -> None:
        self.flat, self.places, self.ready = None, {}, set()


def messages(sizes: Sequence[tuple[Key, int]], on_cpus: bool) -> list[tuple[Key, list[int]]]:
    """Gradients, with what they have to have in common and bytes, in the order in which they are expected: which of
    them travel together.

    >>> messages([("a", 5), ("b", 5), ("a", 7)], on_cpus=True)
    [('a', [0, 2]), ('b', [1])]
    """
    # on CPUs those who send take the time of those who compute: one message is fastest
    parts = 1 if on_cpus else PARTS
    limit = min(BUCKET_BYTES, max(sum(nbytes for _, nbytes in sizes) // parts, LEAST))
    found: list[tuple[Key, list[int]]] = []
    filling: dict[Key, tuple[list[int], int]] = {}
    for number, (key, nbytes) in enumerate(sizes):
        members, before = filling.get(key, ([], 0))
        if not members or before + nbytes > limit:
            members, before = [], 0
            found.append((key, members))
        members.append(number)
        filling[key] = members, before + nbytes
    return found


def make_buckets(parameters: Sequence[torch.Tensor], sums: dict[int, Axes], order: Sequence[int]) -> list[Bucket]:
    """`order`: parameters as their gradients are expected."""
    shapes = {index: stored_part(parameters[index]).shape for index in order if index in sums}
    sizes = [
        ((sums[index], parameters[index].dtype), shape.numel() * parameters[index].element_size())
        for index, shape in shapes.items()
    ]
    on_cpus = all(parameter.device.type == "cpu" for parameter in parameters)
    numbers = list(shapes)
    return [
        Bucket(axes, {numbers[i]: shapes[numbers[i]] for i in members})
        for (axes, _), members in messages(sizes, on_cpus)
    ]


class Memory:
    """Memory that is used again from step to step.

    A large tensor that is made anew in every step comes from the system on a CPU, page by page, each cleared first:
    that takes several times as long as to write the gradients into it. Devices' allocators keep what is freed.
    """

    def __init__(self) -> None:
        self.flats: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self.alone = storage_holders(torch.empty(1))

    def lend(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor, of any contents. It is lent again when nobody has it, or a view of it, any more."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        flats = self.flats[numel, dtype]
        free = next((flat for flat in flats if storage_holders(flat) == self.alone), None)
        if free is None:
            free = torch.empty(numel, dtype=dtype)
            flats.append(free)
        return free.detach()  # a tensor of its own: what is done to it is not done to the one that is kept


class _PlannedForInference(torch.autograd.Function):
    """Hands a tensor on, and refuses its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        fact = "the model returns no loss, or was planned for inference: the plan has no gradients"
        raise TapasError("backward", fact, "pass training=True; the loss may then be made outside of the model")


class _PlainGradient(torch.autograd.Function):
    """Hands a tensor on; its gradient is the same on all ranks, whatever users computed with."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return whole_tensor(gradient) if isinstance(gradient, DTensor) else gradient


def plain_output(value: torch.Tensor) -> torch.Tensor:
    """An output that is the same on all ranks, to be used together with plain tensors and with DTensors."""
    return _PlainGradient.apply(value) if value.requires_grad else value  # type: ignore[return-value]


def refusing_gradients(value: torch.Tensor) -> torch.Tensor:
    """An output that requires a gradient as the original's does, which the program cannot give."""
    if not (value.is_floating_point() or value.is_complex()):
        return value
    return _PlannedForInference.apply(value, torch.zeros((), requires_grad=True))  # type: ignore[return-value]


@dataclass
class Arriving:
    """Gradients of a unit's weights, which leave together."""

    members: set[int] = field(default_factory=set)  # whose gradients are expected, by the last forward pass
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Accumulation:
    """Whether backward passes send gradients, or keep them for one that does; common to all programs of a module."""

    sends: bool = True
    programs: list["Gradients"] = field(default_factory=list)

    def forget_all_but(self, used: Sequence["Gradients"]) -> None:
        """Programs that will not be run again; but not what they have yet to send."""
        self.programs = [program for program in self.programs if program in used or program.unsent]


class Gradients:
    def __init__(
        self, parameters: Sequence[torch.Tensor], trained: set[int], buckets: list[Bucket],
        units: Sequence[Mapping[int, Sequence[Step]]], side: Side, stream: SideStream, count: Count, memory: Memory,
        accumulation: Accumulation,
    ) -> None:  # fmt: skip
        """`units`: parameters that are gathered together, with the steps of that."""
        self.parameters, self.trained, self.buckets = parameters, trained, buckets
        self.side, self.stream, self.count, self.memory = side, stream, count, memory
        self.accumulation = accumulation
        accumulation.programs.append(self)
        self.steps = {index: steps for unit in units for index, steps in unit.items()}
        self.units = [Arriving() for _ in units]
        self.arriving = {index: arriving for unit, arriving in zip(units, self.units, strict=True) for index in unit}
        self.home = {index: bucket for bucket in buckets for index in bucket.members}
        self.unsent: dict[int, torch.Tensor] = {}  # of backward passes that did not send
        self.made: dict[int, torch.Tensor] = {}  # this rank's gradients, summed as far as they have to be
        self.under_way: list[tuple[Any, list[tuple[int, torch.Tensor]]]] = []  # work, and what it will have made
        self.scattered: tuple[UnderWay, dict[int, torch.Tensor]] | None = None  # those of one unit
        self.waiting = False  # for the end of a backward pass
        # parts of parameters, and as autograd takes them
        self.leaves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def leaf(self, index: int, value: torch.Tensor | None = None) -> torch.Tensor:
        """A parameter for one forward pass: this rank's part of it, or what was gathered."""
        if self.waiting and not in_backward():
            self._reset()  # the last backward pass failed half-way
            self.leaves.clear()
        parameter = self.parameters[index]
        wanted = index in self.trained and parameter.requires_grad and torch.is_grad_enabled()
        if value is None:
            return self._stored_leaf(index) if wanted else stored_part(parameter)
        if index in self.arriving:
            (self.arriving[index].members.add if wanted else self.arriving[index].members.discard)(index)
        return self._hooked(index, value) if wanted else value

    def _stored_leaf(self, index: int) -> torch.Tensor:
        """That of the last forward pass if it still is the parameter's memory: to set a hook takes longer."""
        part = _part(self.parameters[index])
        before, leaf = self.leaves.get(index, (None, part))
        if before is not part or leaf.data_ptr() != part.data_ptr():
            leaf = self._hooked(index, part.detach())
            self.leaves[index] = part, leaf
        return leaf

    def _hooked(self, index: int, leaf: torch.Tensor) -> torch.Tensor:
        leaf.requires_grad_()
        leaf.register_post_accumulate_grad_hook(partial(self._arrived, index))
        return leaf

    def _arrived(self, index: int, local: torch.Tensor) -> None:
        gradient, local.grad = local.grad, None
        assert gradient is not None
        if torch.is_grad_enabled():
            raise TapasError("backward", "create_graph=True", "gradients of gradients are not supported")
        self._await_end()
        self._take(index, gradient)

    def _take(self, index: int, gradient: torch.Tensor) -> None:
        """A gradient as the program made it."""
        if index in self.arriving or index in self.home:
            if index in self.unsent:
                gradient = self.unsent.pop(index).add_(gradient)
            if not self.accumulation.sends:
                self.unsent[index] = gradient
                return
        if index not in self.arriving:
            self._pass_on(index, gradient)
            return
        arriving = self.arriving[index]
        before = arriving.gradients.get(index)
        arriving.gradients[index] = gradient if before is None else before + gradient
        if arriving.gradients.keys() >= arriving.members:
            self._scatter(arriving)

    def _pass_on(self, index: int, gradient: torch.Tensor) -> None:
        """A gradient of this rank's part of a parameter."""
        bucket = self.home.get(index)
        if bucket is None:
            self._keep(index, gradient)
            return
        self._pack(bucket, index, gradient)
        if len(bucket.ready) == len(bucket.members):
            self._send()

    def _pack(self, bucket: Bucket, index: int, gradient: torch.Tensor) -> None:
        """At once, while it is in the cache; what it came in is free for the next one."""
        if bucket.flat is None:
            sizes = [shape.numel() for shape in bucket.members.values()]
            bucket.flat = self.memory.lend(sum(sizes), gradient.dtype, gradient.device)
            parts = zip(bucket.members.items(), bucket.flat.split(sizes), strict=True)
            bucket.places = {i: part.view(shape) for (i, shape), part in parts}
        if index in bucket.ready:
            bucket.places[index].add_(gradient)
        else:
            bucket.places[index].copy_(gradient)
            bucket.ready.add(index)
            self.count.copies["backward"] += 1

    def _scatter(self, arriving: Arriving) -> None:
        """Weights that are stored in pieces: sum their gradients and keep this rank's pieces. Those of the unit before
        have had the time of one to get through."""
        self._collect()
        values, arriving.gradients = arriving.gradients, {}
        work = scatter(self.steps, values, self.side, self.count)
        self.scattered = self.stream.start(work, list(values.values())), values

    def _collect(self) -> None:
        if self.scattered is None:
            return
        (under_way, values), self.scattered = self.scattered, None
        under_way.wait()
        for index, part in values.items():
            self._pass_on(index, part)

    def _await_end(self) -> None:
        if not self.waiting:
            self.waiting = True
            when_backward_ends(self._finish)

    def _send(self, all_of_them: bool = False) -> None:
        """Send what is complete, never overtaking an earlier bucket; at the end what there is."""
        before = None
        for bucket in self.buckets:
            complete = len(bucket.ready) == len(bucket.members)
            if not all_of_them and before is not None and before.sent <= bucket.sent:
                return
            if bucket.ready and (complete or all_of_them):
                self._launch(bucket)
            before = bucket

    def _launch(self, bucket: Bucket) -> None:
        flat, places = bucket.flat, bucket.places
        assert flat is not None
        if len(bucket.ready) < len(bucket.members):  # some take no part in this pass
            members = [index for index in bucket.members if index in bucket.ready]
            flat = torch.cat([places[index].reshape(-1) for index in members])
            parts = zip(members, flat.split([places[index].numel() for index in members]), strict=True)
            places = {index: part.view_as(places[index]) for index, part in parts}
        bucket.empty()
        bucket.sent += 1
        self.count.add("backward", "all_reduce", bucket.axes, flat.numel() * flat.element_size())
        self.under_way.append((self.side.sum(bucket.axes, flat, places), list(places.items())))

    def _keep(self, index: int, gradient: torch.Tensor) -> None:
        self.made[index] = self.made[index] + gradient if index in self.made else gradient

    def _finish(self) -> None:
        """At the end of a backward pass."""
        if self.accumulation.sends:
            for other in self.accumulation.programs:
                if other is not self:
                    other._finish_own()
        self._finish_own()

    def _finish_own(self) -> None:
        try:
            with torch.no_grad():
                if self.accumulation.sends:
                    for index in sorted(self.unsent):  # those that took no part in this pass
                        self._take(index, torch.zeros_like(self.unsent[index]))
                for arriving in self.units:
                    if arriving.gradients:
                        self._scatter(arriving)
                self._collect()
                self._send(all_of_them=True)
                for work, views in self.under_way:
                    work.wait()
                    for index, gradient in views:
                        self._keep(index, gradient)
                for index, gradient in self.made.items():
                    hand_over(self.parameters[index], gradient)
        finally:
            self._reset()

    def _reset(self) -> None:
        self.under_way, self.scattered, self.made, self.waiting = [], None, {}, False
        for arriving in self.units:
            arriving.gradients = {}
        for bucket in self.buckets:
            bucket.sent = 0
            bucket.empty()


def scatter(
    steps: Mapping[int, Sequence[Step]], values: dict[int, torch.Tensor], side: Side, count: Count
) -> Iterator[None]:
    """Gradients of gathered weights the way back, those of a unit together; `values` become this rank's parts."""
    left = {index: [step.back for step in steps[index]] for index in values}
    shapes: dict[int, torch.Size] = {}
    while any(left.values()):
        works: list[Any] = []
        lots: dict[Any, dict[int, tuple[Conversion, torch.Tensor]]] = defaultdict(dict)
        for index, remaining in left.items():
            step = remaining.pop() if remaining else None
            if step is not None and step.kind == "all_reduce":
                values[index] = values[index].contiguous()
                count.add("backward", "all_reduce", step.axes, values[index].numel() * values[index].element_size())
                works.append(side.sum(step.axes, values[index], (index,)))
            elif step is not None and step.kind == "reduce_scatter":
                shapes[index] = values[index].shape
                flat = step.joint.pack(values[index])
                count.copied("backward", values[index], flat)
                lots[step.axes, flat.dtype][index] = step, flat
                del values[index]  # it is packed, or what is packed
            elif step is not None:  # it is whole on every rank
                values[index] = step.local(values[index])
        parts: dict[int, torch.Tensor] = {}
        for (axes, _), lot in lots.items():
            count.add("backward", "reduce_scatter", axes, sum(x.numel() * x.element_size() for _, x in lot.values()))
            for index, (step, flat) in lot.items():
                parts[index] = flat.new_empty(flat.numel() // step.joint.sizes[0])
            flats = [flat for _, flat in lot.values()]
            works.append(side.scatter(axes, [parts[index] for index in lot], flats, list(lot)))
        yield
        for work in works:
            work.wait()
        for lot in lots.values():
            for index, (step, _) in lot.items():
                values[index] = step.joint.own_part(parts[index], shapes[index])


def stored_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, of which autograd knows nothing."""
    return _part(parameter).detach()


def _part(parameter: torch.Tensor) -> torch.Tensor:
    return local_part(parameter) if isinstance(parameter, DTensor) else parameter


def hand_over(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """As autograd does it for a parameter that it knows: hooks see the gradient, then the parameter."""
    made = gradient.contiguous()
    if isinstance(parameter, DTensor):  # as FSDP2 does it: from_local takes ten times as long
        made = like_parameter(made, parameter)
    for hook in gradient_hooks(parameter):
        changed = hook(made)
        made = made if changed is None else changed
    if parameter.grad is None:
        parameter.grad = made
    else:
        stored_part(parameter.grad).add_(stored_part(made))
    for hook in accumulation_hooks(parameter):
        hook(parameter)
