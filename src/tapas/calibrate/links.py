"""Collectives over message sizes, and the latency and bandwidth with which the cost model says what they take."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from tapas.calibrate.fit import least_squares
from tapas.calibrate.ranks import Ranks
from tapas.calibrate.timing import Stopwatch
from tapas.cost.collectives import AxisLink, collective_seconds
from tapas.hardware.cluster import ANY, COLLECTIVES, MESSAGES, Curves, Link
from tapas.runtime.collectives import GroupAxis
from tapas.util import Progress

LARGEST = {"cpu": 1 << 24, "cuda": 1 << 28}  # bytes
ITEM = 4  # bytes of float32
WIDTH = 384  # of the product before a collective
NEAR = 0.1  # by how much the model is off in logarithms where nothing disturbs
SLOWEST = 1e6  # bytes per second
FARTHEST = 4.0  # times: what is farther from latency and bandwidth was held up
FASTER = 2.0  # a link is at most so much faster than its largest messages have been: half of their time is latency


@dataclass(frozen=True, slots=True)
class Message:
    kind: str
    nbytes: int  # of the whole tensor; of a rank's part in an all_to_all
    seconds: float


@dataclass(frozen=True)
class MeasuredLink:
    link: Link  # latency and bandwidth, the same for all collectives
    size: int  # of the group
    messages: tuple[Message, ...]

    def predicted(self, message: Message) -> float:
        return _seconds(message, self.link, self.size)

    def typical(self, kind: str) -> float:
        """By how much predicted / measured is off in the median."""
        found = [abs(math.log(self.predicted(m) / m.seconds)) for m in self.of(kind)]
        return math.expm1(statistics.median(found))

    def of(self, kind: str) -> list[Message]:
        """From the smallest to the largest one."""
        return sorted((m for m in self.messages if m.kind == kind), key=lambda m: m.nbytes)

    @property
    def curves(self) -> Curves:
        """How many times as long as latency and bandwidth say each collective has taken, by size. One message that is
        unlike those a little smaller and a little larger was held up."""
        return tuple([(kind, _smoothed([self._times(m) for m in self.of(kind)])) for kind in COLLECTIVES])

    @property
    def curved(self) -> Link:
        return replace(self.link, times=((ANY, self.curves),))

    def _times(self, message: Message) -> float:
        return min(max(message.seconds / self.predicted(message), 1 / FARTHEST), FARTHEST)

    @property
    def disorder(self) -> tuple[Message, Message] | None:
        """A message that took longer than the largest one of its kind, and that one: what was measured then is how
        busy the machine was, and no bandwidth."""
        for *smaller, largest in map(self.of, COLLECTIVES):
            slowest = max(smaller, key=lambda m: m.seconds, default=largest)
            if slowest.seconds > largest.seconds:
                return slowest, largest
        return None


def _seconds(message: Message, link: Link, size: int) -> float:
    return float(collective_seconds(message.kind, message.nbytes, AxisLink.of(size, link)))


def measure_link(group: Any, ranks: Ranks, watch: Stopwatch, progress: Progress, name: str) -> MeasuredLink:
    axis, messages = GroupAxis(group), list[Message]()
    for nbytes in [n for n in MESSAGES if n <= LARGEST[watch.device.type]]:
        progress(f"{name}, {nbytes:,} bytes")
        seconds = ranks.mean([_beside_work(work, watch) for work in _collectives(axis, nbytes, watch.device)])
        messages += [Message(kind, nbytes, max(found, 1e-7)) for kind, found in zip(COLLECTIVES, seconds, strict=True)]
    return MeasuredLink(fit_link(messages, axis.size), axis.size, tuple(messages))


def fit_link(messages: Sequence[Message], size: int) -> Link:
    """Latency and bandwidth at which the errors of the logarithms are least, as they are and not squared: a message
    that was held up says nothing of the link."""

    def errors(values: Mapping[str, float]) -> list[float]:
        link = Link(values["bytes_per_s"], values["latency_seconds"])
        return [_tempered(math.log(_seconds(m, link, size) / m.seconds)) for m in messages]

    shown = _shown_bytes_per_s(messages, size)
    bounds = {"bytes_per_s": (SLOWEST, max(FASTER * shown, SLOWEST)), "latency_seconds": (1e-7, 0.1)}
    found = least_squares({"bytes_per_s": shown, "latency_seconds": 1e-5}, errors, bounds.__getitem__)
    return Link(found["bytes_per_s"], found["latency_seconds"])


def _shown_bytes_per_s(messages: Sequence[Message], size: int) -> float:
    """What the largest messages have reached, latency and all, in the median over kinds."""
    free, largest = Link(1.0, 0.0), max(m.nbytes for m in messages)  # on a free link seconds are bytes
    return statistics.median_low(_seconds(m, free, size) / m.seconds for m in messages if m.nbytes == largest)


def _tempered(error: float) -> float:
    """Whose square grows as the error does, where that is large."""
    near = error / NEAR
    return math.copysign(NEAR * math.sqrt(2 * (math.hypot(1.0, near) - 1.0)), error)


def _smoothed(curve: Sequence[float]) -> tuple[float, ...]:
    """Medians of three.

    >>> _smoothed([2.0, 1.5, 9.0, 1.1])
    (2.0, 2.0, 1.5, 1.1)
    """
    inner = [statistics.median(curve[i - 1 : i + 2]) for i in range(1, len(curve) - 1)]
    return (curve[0], *inner, curve[-1])


def _collectives(axis: GroupAxis, nbytes: int, device: torch.device) -> list[Callable[[], Any]]:
    whole = torch.zeros(max(nbytes // ITEM // axis.size, 1) * axis.size, device=device)
    part, each = whole[: len(whole) // axis.size].clone(), [len(whole) // axis.size] * axis.size
    return [
        lambda: axis.all_reduce(whole),
        lambda: axis.all_gather(part),
        lambda: axis.reduce_scatter(whole),
        lambda: axis.all_to_all(whole, each, each),
    ]


def _beside_work(work: Callable[[], Any], watch: Stopwatch) -> float:
    """What it adds to a computation: ranks that come from one do not arrive at the same time."""
    x = torch.ones(WIDTH, WIDTH, device=watch.device)
    return watch(lambda: (x @ x, work())) - watch(lambda: x @ x)


def measure_overlap(group: Any, ranks: Ranks, watch: Stopwatch) -> float:
    """The share of a message that a computation beside it does not feel."""
    nbytes = LARGEST[watch.device.type] // 8
    x, sent = torch.ones(WIDTH, WIDTH, device=watch.device), torch.zeros(nbytes // ITEM, device=watch.device)
    ranks.together()
    alone = watch(lambda: dist.all_reduce(sent, group=group))
    times = max(1, round(watch.agree(alone / watch(lambda: x @ x))))

    def compute() -> None:
        for _ in range(times):
            _ = x @ x

    def both() -> None:
        under_way = dist.all_reduce(sent, group=group, async_op=True)
        compute()
        under_way.wait()  # type: ignore[union-attr]

    computed, together = watch(compute), watch(both)
    (share,) = ranks.mean([(alone + computed - together) / min(alone, computed)])
    return min(max(share, 0.0), 1.0)
