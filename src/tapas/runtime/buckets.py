"""Gradients of whole weights, packed into few large messages, each sent as soon as its last gradient is there."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from tapas.cost.collectives import BUCKET_BYTES
from tapas.runtime.collectives import Axes, Count, Side
from tapas.runtime.lent_memory import Memory
from tapas.runtime.parameters import stored_part

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


class Buckets:
    """What is on its way of one backward pass."""

    def __init__(self, buckets: Sequence[Bucket], side: Side, count: Count, memory: Memory) -> None:
        self.buckets, self.side, self.count, self.memory = buckets, side, count, memory
        self.home = {index: bucket for bucket in buckets for index in bucket.members}
        self.under_way: list[tuple[Any, list[tuple[int, torch.Tensor]]]] = []  # work, and what it will have made

    def __contains__(self, index: int) -> bool:
        return index in self.home

    def add(self, index: int, gradient: torch.Tensor) -> None:
        bucket = self.home[index]
        self._pack(bucket, index, gradient)
        if len(bucket.ready) == len(bucket.members):
            self.send()

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

    def send(self, all_of_them: bool = False) -> None:
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
        self.under_way.append((self.side.sum(bucket.axes, [flat], places), list(places.items())))

    def sums(self) -> Iterator[tuple[int, torch.Tensor]]:
        """All that was sent, when it has arrived."""
        for work, members in self.under_way:
            work.wait()
            yield from members

    def reset(self) -> None:
        self.under_way = []
        for bucket in self.buckets:
            bucket.sent = 0
            bucket.empty()
