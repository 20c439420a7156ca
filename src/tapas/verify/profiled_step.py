"""What torch's profiler saw of a recorded step on one rank: which operator or move of the plan each event belongs to.

Events of the host lie in each other; some are marks (runtime/recorder.py). An operator of a block is marked by its
number in the block, and the call of the block by which copy it is. A node of the backward pass has the number that an
operator had when it made the node; so it belongs to what that operator belongs to.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tapas.ir.graph import Graph, Op
from tapas.plan.lanes import AHEAD, BEHIND
from tapas.runtime.recorder import NAME, STEP, CopyMark, Mark, MoveMark, OperatorMark, SentMark

NODE = "autograd::engine::evaluate_function: "  # before the name of a node of the backward pass
WRAPPERS = ("autograd::", "torch::", "c10d::", "profiler::")  # around operators
LAUNCHES, ON_DEVICE = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "user_annotation", *LAUNCHES)


class ProfiledEvent:
    """Of the profiler."""

    def __init__(self, raw: Mapping[str, Any], base: int, marks: Sequence[Mark]) -> None:
        self.name, self.category, self.thread = str(raw["name"]), str(raw.get("cat")), raw["tid"]
        self.start: int = base + round(raw["ts"] * 1000)
        self.end: int = self.start + round(raw.get("dur", 0) * 1000)
        self.details: Mapping[str, Any] = raw.get("args", {})
        self.mark = marks[int(self.name.removeprefix(NAME))] if self.name.startswith(NAME) else None
        self.parent: ProfiledEvent | None = None

    @property
    def enclosing(self) -> "Iterator[ProfiledEvent]":
        """Itself and what it lies in, outwards."""
        event: ProfiledEvent | None = self
        while event is not None:
            yield event
            event = event.parent

    @property
    def operates(self) -> bool:
        """Whether it is an operator, and nothing that has operators or collectives within."""
        return self.category == "cpu_op" and "::" in self.name and not self.name.startswith(WRAPPERS)


@dataclass(frozen=True)
class _Owner:
    """What the host does at a moment."""

    first: int  # operator of the copy; -1: of no copy that is known
    mark: OperatorMark | MoveMark
    backward: bool


class ProfiledStep:
    def __init__(self, profile: Mapping[str, Any], marks: Sequence[Mark], graph: Graph) -> None:
        base = int(profile.get("baseTimeNanoseconds", 0))
        self.graph = graph
        self.events = [ProfiledEvent(raw, base, marks) for raw in profile["traceEvents"] if raw.get("ph") == "X"]
        self.events.sort(key=lambda event: (event.start, -event.end))
        (self.step,) = [event for event in self.events if event.mark == STEP and event.category in ON_HOST]
        self.on_device = [event for event in self.events if event.category in ON_DEVICE]
        native = [event for event in self.events if event.name.startswith("gloo:")]
        self.native = [event for event in native if event.thread != self.step.thread]  # where single messages start
        sending = {event.thread for event in self.native}  # those threads pack what they send
        self.host = [event for event in self.events if self._on_host(event) and event.thread not in sending]
        self._nest()

    def _on_host(self, event: ProfiledEvent) -> bool:
        known = event.category in ON_HOST and (event.mark is not None or event.category != "user_annotation")
        return known and self.step.start <= event.start < self.step.end

    def _nest(self) -> None:
        open_events: dict[Any, list[ProfiledEvent]] = {}
        for event in self.host:
            stack = open_events.setdefault(event.thread, [])
            while stack and stack[-1].end <= event.start:
                stack.pop()
            event.parent = stack[-1] if stack else None
            if not (isinstance(event.mark, SentMark) and event.mark.timed):  # that one ends on another thread
                stack.append(event)

    @cached_property
    def makers(self) -> dict[int, ProfiledEvent]:
        """What has made each node of the backward pass. Several operators may have a node's number, of which the last
        one has made it."""
        forward = [event for event in self.host if event.thread == self.step.thread and event.mark is None]
        numbered = [event for event in forward if "Sequence number" in event.details and not self.node_around(event)]
        return {event.details["Sequence number"]: event for event in numbered}

    def node_around(self, event: ProfiledEvent) -> ProfiledEvent | None:
        return next((e for e in event.enclosing if e.name.startswith(NODE)), None)

    def owner(self, event: ProfiledEvent) -> _Owner | None:
        """The operator or move, forward or backward, that an event on the host belongs to."""
        for around in event.enclosing:
            if isinstance(around.mark, OperatorMark | MoveMark):
                return _Owner(self._first(around), around.mark, backward=False)
            if around.name.startswith(NODE):
                return self._made(around)
        return None

    def _made(self, node: ProfiledEvent) -> _Owner | None:
        maker = self.makers.get(node.details.get("Sequence number", -1))
        owner = self.owner(maker) if maker is not None else None
        return _Owner(owner.first, owner.mark, backward=True) if owner is not None else None

    def _first(self, event: ProfiledEvent) -> int:
        """The copy that is called; or, of what is computed again, the one whose backward pass asks for it."""
        for around in event.enclosing:
            if isinstance(around.mark, CopyMark):
                return around.mark.first
            if around.name.startswith(NODE):
                owner = self._made(around)
                return owner.first if owner is not None else -1
        return -1

    def operator(self, owner: _Owner) -> Op | None:
        return self.graph.ops[owner.first + owner.mark.number] if owner.first >= 0 else None

    def launch_of(self, event: ProfiledEvent) -> ProfiledEvent | None:
        """Where the host has launched what runs on a device."""
        return self._launches.get(event.details.get("correlation"))

    @cached_property
    def _launches(self) -> dict[Any, ProfiledEvent]:
        return {e.details.get("correlation"): e for e in self.host if e.category in LAUNCHES}

    # -- in words -------------------------------------------------------------------------------------

    def described(self, event: ProfiledEvent) -> tuple[str, dict[str, Any]]:
        """Name and details of what the host does at an event."""
        owner = self.owner(event)
        op = self.operator(owner) if owner is not None else None
        if owner is None or op is None:
            return event.name.removeprefix(NODE), {}
        again = not owner.backward and self.node_around(event) is not None
        phase = "backward" if owner.backward else "computed again" if again else "forward"
        name = f"{op.module or 'model'} {op.target.split('.')[1]}"
        details = {"phase": phase, "module": op.module, "operator": op.name, "target": op.target}
        if isinstance(owner.mark, MoveMark):
            details["move"] = owner.mark.text
        return f"{name} {phase}" if phase != "forward" else name, details

    def sent(self, event: ProfiledEvent, mark: SentMark, axes: Sequence[str]) -> tuple[str, dict[str, Any]]:
        over = [axes[axis] for axis in mark.axes]
        details: dict[str, Any] = {"kind": mark.kind, "axes": over, "nbytes": mark.nbytes, "phase": mark.phase}
        details["pass"] = "backward" if mark.backward else "forward"
        if mark.weights:
            details["weights"] = list(mark.weights)
        if mark.role == AHEAD:
            where = _common_module(mark.weights)
        elif mark.role == BEHIND:  # whoever has made the last of these gradients
            where = self.last_backward(event)
        else:
            where, more = self.described(event)
            where, details = where if more else "", more | details
        name = f"{mark.kind.replace('_', '-')} over {', '.join(over)}"
        return (f"{name}: {where}" if where else name), details

    def last_backward(self, event: ProfiledEvent) -> str:
        before = [e for e in self._nodes if e.start <= event.start]
        owner = self._made(before[-1]) if before else None
        op = self.operator(owner) if owner is not None else None
        return f"after {op.module or op.target}" if op is not None else ""

    @cached_property
    def _nodes(self) -> list[ProfiledEvent]:
        return [e for e in self.host if e.name.startswith(NODE) and self._made(e) is not None]


def _common_module(weights: Sequence[str]) -> str:
    parts = [weight.split(".")[:-1] for weight in weights]
    shared: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared) or ", ".join(weights[:1])
