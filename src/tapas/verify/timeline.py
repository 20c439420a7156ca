"""One step of one rank, from what torch's profiler saw: operators, moves and waits in lanes, and what was hidden.

*Under way* is a collective from its launch to its end on CPUs (of one that is waited for: from where it is sent to
where it has arrived), and its kernel on GPUs. *Hidden* is the part of that during which the same rank computes: on CPUs
an operator runs, in the forward or backward pass, or a copy of the runtime's or the optimizer's step, and nobody waits;
on GPUs the stream of the computation is busy with something else than a collective.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tapas.ir.graph import Graph
from tapas.plan.lanes import AHEAD, BEHIND, COMPUTE, HOST, MOVES
from tapas.plan.perfetto import Span
from tapas.runtime.recorder import OPTIMIZER, WAIT, Mark, OperatorMark, SentMark
from tapas.verify.intervals import Intervals, common, length, union, without
from tapas.verify.profiled_step import NODE, ProfiledEvent, ProfiledStep

ROLES = (MOVES, AHEAD, BEHIND)


@dataclass(frozen=True)
class Overlap:
    """What one rank sent of one role."""

    role: str
    collectives: int
    nbytes: int
    seconds: float  # under way
    hidden: float  # seconds of these


@dataclass(frozen=True)
class Timeline:
    spans: tuple[Span, ...]
    start: int  # of the step, nanoseconds
    end: int
    overlaps: tuple[Overlap, ...]  # by role
    total: Overlap  # of all roles: what is under way at the same time counts once


def timeline(profile: Mapping[str, Any], marks: Sequence[Mark], graph: Graph, axes: Sequence[str]) -> Timeline:
    """`profile`: as torch's profiler writes it; `axes`: of the mesh, by name."""
    seen = ProfiledStep(profile, marks, graph)
    computing = list(_host_spans(seen))
    sent = [(event, event.mark) for event in seen.host if isinstance(event.mark, SentMark)]
    if seen.on_device:
        spans, under_way, busy = _on_device(seen, computing, axes)
    else:
        spans, under_way, busy = _on_host(seen, computing, sent, axes)
    overlaps = [_overlap(role, [mark for _, mark in sent if mark.role == role], under_way, busy) for role in ROLES]
    everything = {"total": [interval for intervals in under_way.values() for interval in intervals]}
    total = _overlap("total", [mark for _, mark in sent], everything, busy)
    return Timeline(tuple(spans), seen.step.start, seen.step.end, tuple(overlaps), total)


def _overlap(role: str, marks: Sequence[SentMark], under_way: Mapping[str, Intervals], busy: Intervals) -> Overlap:
    moments = union(under_way.get(role, []))
    seconds, hidden = length(moments) / 1e9, length(common(moments, busy)) / 1e9
    return Overlap(role, len(marks), sum(mark.nbytes for mark in marks), seconds, hidden)


def _host_spans(seen: ProfiledStep) -> Iterator[Span]:
    """What the host computes, and where it waits."""
    shown: set[int] = set()  # events whose time is accounted for

    def inside(event: ProfiledEvent) -> bool:
        return any(id(around) in shown for around in event.enclosing)

    for event in seen.host:
        if isinstance(event.mark, SentMark):
            shown.add(id(event))
        elif event.mark in (WAIT, OPTIMIZER):
            category, name = ("wait", "wait") if event.mark == WAIT else ("operator", "optimizer step")
            yield Span(COMPUTE, name, category, event.start, event.end)
            shown.add(id(event))
        elif isinstance(event.mark, OperatorMark) or (event.name.startswith(NODE) and _of_operator(seen, event)):
            name, details = seen.described(event)
            yield Span(COMPUTE, name, "operator", event.start, event.end, details)
            shown.add(id(event))
        elif event.name.startswith("c10d::"):
            shown.add(id(event))
        elif event.operates and not inside(event):
            yield Span(COMPUTE, event.name, "runtime", event.start, event.end, seen.described(event)[1])
            shown.add(id(event))


def _of_operator(seen: ProfiledStep, node: ProfiledEvent) -> bool:
    owner = seen.owner(node)
    return owner is not None and isinstance(owner.mark, OperatorMark)


Recorded = tuple[list[Span], dict[str, Intervals], Intervals]  # spans, when what was under way, when it was busy


def _on_host(
    seen: ProfiledStep, computing: list[Span], sent: Sequence[tuple[ProfiledEvent, SentMark]], axes: Sequence[str]
) -> Recorded:
    spans, under_way = list(computing), defaultdict[str, Intervals](list)
    ends = _ends(seen, sent)
    for event, mark in sent:
        name, details = seen.sent(event, mark, axes)
        start, end = event.start, ends.get(id(event), event.end)
        if mark.role == MOVES:  # what is copied first is not under way yet
            start = next((e.start for e in seen.host if e.parent is event and e.name.startswith("c10d::")), start)
        spans.append(Span(mark.role, name, "collective", start, end, details))
        under_way[mark.role].append((start, end))
    waits = [(span.start, span.end) for span in computing if span.category == "wait"]
    waits += [(event.start, event.end) for event, mark in sent if mark.role == MOVES]
    busy = union((span.start, span.end) for span in computing if span.category != "wait")
    return spans, under_way, without(busy, union(waits))


def _ends(seen: ProfiledStep, sent: Sequence[tuple[ProfiledEvent, SentMark]]) -> dict[int, int]:
    """When collectives ended that could not tell: gloo's reduce-scatter is an all-reduce of each tensor, which the
    profiler has seen. They are run in the order in which they are launched; those of other collectives are left out
    first, which lie within these."""
    left = list(seen.native)
    untimed = [(event, mark) for event, mark in sent if mark.role != MOVES and not mark.timed]
    for event, mark in sent if untimed else ():
        if mark.role == MOVES or mark.timed:
            within = [e for e in left if event.start <= e.start and e.end <= event.end and _is_of(e, mark.shapes[:1])]
            left = [e for e in left if e is not max(within, key=lambda e: e.end, default=None)]
    ends: dict[int, int] = {}
    for event, mark in untimed:
        for shape in mark.shapes:
            own = next((e for e in left if e.start >= event.start and _is_of(e, (shape,))), None)
            if own is None:
                raise RuntimeError(f"the profiler has not seen the end of {mark.kind} of a tensor of shape {shape}")
            left.remove(own)
            ends[id(event)] = max(ends.get(id(event), event.end), own.end)
    return ends


def _is_of(native: ProfiledEvent, shapes: Sequence[tuple[int, ...]]) -> bool:
    return [list(shape) for shape in shapes] == native.details["Input Dims"][: len(shapes)]


def _on_device(seen: ProfiledStep, computing: list[Span], axes: Sequence[str]) -> Recorded:
    spans = [replace(span, lane=HOST) for span in computing]
    under_way: dict[str, Intervals] = defaultdict(list)
    others: dict[int, Intervals] = defaultdict(list)  # by stream
    computed: Counter[int] = Counter()  # nanoseconds of operators, by stream
    roles: dict[int, str] = {}
    on_streams: list[tuple[int, Span]] = []
    for event in seen.on_device:
        launch = seen.launch_of(event)
        if launch is None:  # of another step
            continue
        stream, when = int(event.details.get("stream", 0)), (event.start, event.end)
        sent = next((e for e in launch.enclosing if isinstance(e.mark, SentMark)), None)
        if "nccl" in event.name.lower():
            name, details, category = event.name, dict[str, Any](), "collective"
            if sent is not None and isinstance(sent.mark, SentMark):
                name, details = seen.sent(sent, sent.mark, axes)
                under_way[sent.mark.role].append(when)
                roles[stream] = sent.mark.role
        else:
            name, details = seen.described(launch)
            category = "operator" if details and "move" not in details and sent is None else "runtime"
            name = name if category == "operator" else event.name
            others[stream].append(when)
            computed[stream] += (event.end - event.start) * (category == "operator")
        on_streams.append((stream, Span("", name, category, *when, {"kernel": event.name, **details})))
    roles |= {stream: COMPUTE for stream, _ in computed.most_common(1)}
    for stream, span in on_streams:
        lane = f"stream {stream}: {roles[stream]}" if stream in roles else f"stream {stream}"
        spans.append(replace(span, lane=lane))
    busy = union(when for stream, moments in others.items() if roles.get(stream) == COMPUTE for when in moments)
    return spans, under_way, busy


def summed(overlaps: Iterable[Overlap], ranks: int) -> Overlap:
    """Of several ranks: the most that one of them sent, and the mean of their times."""
    every = list(overlaps)
    return Overlap(
        every[0].role, max(o.collectives for o in every), max(o.nbytes for o in every),
        sum(o.seconds for o in every) / ranks, sum(o.hidden for o in every) / ranks,
    )  # fmt: skip
