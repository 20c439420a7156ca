"""One training step of a plan, operator by operator: what its streams do when.

Two streams, as the runtime has them. The first one computes, and waits for moves of activations. The second one carries
what runs beside it, one message after the other: a block's weights are gathered while the block before it computes
(the first block's are waited for), its gradients leave when its backward pass is done, and the optimizer waits for the
last of them. Nothing starts before the host has launched it, which takes it the same time for every operator, in both
passes (in a compiled program, for every one that reads or writes memory). All devices are taken to be as busy as the
busiest one, and micro batches to be one that takes so many times as long.

The search has to price every operator by itself, and hides a weight's messages behind the operator that reads it; here
they hide behind whole blocks, in the order in which they are sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tapas.hardware.cluster import COLLECTIVES
from tapas.plan.lanes import AHEAD, BEHIND, COMPUTE, MOVES
from tapas.plan.plan import Move, Operator, Plan, PlanBlock

# What the host needs for a kernel of a compiled program, calls of blocks included, over an operator of an eager one:
# fitted to GPT-2 and Llama on an H200 (docs/gpu.md).
COMPILED_HOST = 1.25


@dataclass(frozen=True, slots=True)
class Task:
    lane: str
    name: str
    seconds: float
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Script:
    """What one copy of a block has to do."""

    name: str
    forward: tuple[Task, ...] = ()
    backward: tuple[Task, ...] = ()
    gathers: tuple[Task, ...] = ()  # before its forward pass
    again: tuple[Task, ...] = ()  # before its backward pass
    reductions: tuple[Task, ...] = ()  # after it


@dataclass(frozen=True, slots=True)
class Turn:
    """A copy's forward or backward pass, or the optimizer's update: what the first stream does without a pause."""

    copy: int
    phase: str  # "forward", "backward" or "update"
    name: str  # of the block
    start: float
    tasks: tuple[Task, ...]
    starts: tuple[float, ...]  # of the tasks
    stalled: float = 0.0  # seconds at its end that sending takes from computing

    @property
    def end(self) -> float:
        return self.starts[-1] + self.tasks[-1].seconds + self.stalled if self.tasks else self.start

    @property
    def held(self) -> float:
        """Seconds of these in which nothing was launched yet."""
        return self.end - self.start - self.stalled - sum([task.seconds for task in self.tasks])


@dataclass(frozen=True, slots=True)
class Sending:
    """What the second stream sends for a copy."""

    copy: int
    start: float
    tasks: tuple[Task, ...]

    @property
    def starts(self) -> list[float]:
        """Of the tasks."""
        return list(accumulate([task.seconds for task in self.tasks[:-1]], initial=self.start))

    @property
    def end(self) -> float:
        return self.start + sum([task.seconds for task in self.tasks])


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    seconds: float
    turns: tuple[Turn, ...]
    messages: tuple[Sending, ...]

    @property
    def compute(self) -> float:
        return self._sum([task for turn in self.turns for task in turn.tasks if task.lane == COMPUTE])

    @property
    def sent(self) -> float:
        """Seconds of communication, on both streams."""
        moves = [task for turn in self.turns for task in turn.tasks if task.lane == MOVES]
        return self._sum([*moves, *(task for message in self.messages for task in message.tasks)])

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed."""
        return self.seconds - self.compute

    @property
    def held(self) -> float:
        """Seconds of these that wait for the host."""
        return sum([turn.held for turn in self.turns])

    @property
    def hidden(self) -> float:
        return max(0.0, self.sent - (self.exposed - self.held))

    @staticmethod
    def _sum(tasks: Sequence[Task]) -> float:
        return sum([task.seconds for task in tasks])


def simulate(plan: Plan) -> SimulatedStep | None:
    """None for a plan file that does not say what each copy does."""
    scripts = copies_of(plan)
    if scripts is None:
        return None
    update = plan.seconds.get("update", 0.0) if plan.training else None
    host = float(plan.cluster["device"].get("host_seconds", 0.0)) * plan.source.get("accumulate", 1)
    host *= COMPILED_HOST if plan.source.get("compile", False) else 1.0
    return scheduled(scripts, update, float(plan.cluster.get("overlap", 1.0)), host)


def scheduled(
    scripts: Sequence[Script], update: float | None, overlap: float = 1.0, host_seconds: float = 0.0
) -> SimulatedStep:
    """Copies in turn; without an `update` the forward pass only. What of a message does not `overlap` with what is
    computed takes its time; `host_seconds` are those of a launch."""
    return _Streams(overlap, host_seconds).run(scripts, update)


class _Streams:
    def __init__(self, overlap: float, host_seconds: float) -> None:
        self.overlap, self.host_seconds = overlap, host_seconds
        self.launched = 0.0  # when the host has launched the last task
        self.computed = self.sent = 0.0  # when each of them is free
        self.turns: list[Turn] = []
        self.messages: list[Sending] = []

    def run(self, scripts: Sequence[Script], update: float | None) -> SimulatedStep:
        self._pass("forward", list(enumerate(scripts)))
        if update is not None:
            self._pass("backward", list(enumerate(scripts))[::-1])
            self.computed = max(self.computed, self.sent)
            task = Task(COMPUTE, "optimizer update", update)
            self._turn(len(scripts) - 1, "update", "optimizer", (task,), 0.0)
        return SimulatedStep(max(self.computed, self.sent), tuple(self.turns), tuple(self.messages))

    def _pass(self, phase: str, copies: Sequence[tuple[int, Script]]) -> None:
        gathers = {copy: s.gathers if phase == "forward" else s.again for copy, s in copies}
        waiting = [copy for copy, tasks in gathers.items() if tasks]
        arrived: dict[int, float] = {}

        def gather_next() -> float:
            copy = waiting.pop(0)
            arrived[copy] = self._send(copy, gathers[copy])
            return (1 - self.overlap) * (arrived[copy] - self.messages[-1].start)

        if waiting:
            gather_next()  # nothing computes beside it
        for copy, script in copies:
            self.computed, stalled = max(self.computed, arrived.get(copy, 0.0)), 0.0
            if copy in arrived and waiting:
                stalled = gather_next()
            tasks = script.forward if phase == "forward" else script.backward
            self._turn(copy, phase, script.name, tasks, stalled)
            if phase == "backward" and script.reductions:
                before = self.computed
                ended = self._send(copy, script.reductions)
                self.computed = before + (1 - self.overlap) * (ended - self.messages[-1].start)

    def _turn(self, copy: int, phase: str, name: str, tasks: tuple[Task, ...], stalled: float) -> None:
        if not tasks:
            return
        now, starts = self.computed, list[float]()
        for task in tasks:
            self.launched += self.host_seconds
            now = max(now, self.launched)
            starts.append(now)
            now += task.seconds
        self.turns.append(Turn(copy, phase, name, self.computed, tasks, tuple(starts), stalled))
        self.computed = self.turns[-1].end

    def _send(self, copy: int, tasks: tuple[Task, ...]) -> float:
        """When it has arrived, if it is sent as soon as it can be."""
        self.messages.append(Sending(copy, max(self.computed, self.sent), tasks))
        self.sent = self.messages[-1].end
        return self.sent


# ---------------------------------------------------------------------------------------- what each copy does


def copies_of(plan: Plan) -> list[Script] | None:
    """A script for every copy, in order; those that do the same share one."""
    scripts: dict[int, Script] = {}
    if any(not block.numbers for block in plan.blocks) or any(not move.numbers for move in plan.moves):
        return None
    moves_of: dict[int, list[Move]] = {}
    for move in plan.moves:
        for number in move.numbers:
            moves_of.setdefault(number, []).append(move)
    first = 0
    for block in plan.blocks:
        operators, first = plan.operators[first : first + block.operators], first + block.operators
        made: dict[tuple[int, ...], Script] = {}
        for number in block.numbers:
            moves = moves_of.get(number, [])
            key = tuple(map(id, moves))
            made[key] = scripts[number] = made.get(key) or _script(plan, block, operators, moves)
    return [scripts[number] for number in sorted(scripts)]


def _script(plan: Plan, block: PlanBlock, operators: Sequence[Operator], moves: Sequence[Move]) -> Script:
    gathers: list[Task] = []
    again: list[Task] = []
    reductions: list[Task] = []
    inline: dict[int, list[Move]] = {}  # by the operator before which the tensor is moved
    for move in moves:
        beside = [step for step in move.steps if step.get("beside")]
        gathers += _steps(move, beside, "forward", AHEAD)
        again += _steps(move, beside, "forward", AHEAD) if move.again else []
        reductions += _steps(move, beside[::-1], "backward", BEHIND)
        inline.setdefault(_place(move), []).append(move)
    places = range(len(operators) + 1)  # behind the last operator outputs are moved
    forward = [task for place in places for task in _forward(operators, inline, place)]
    repeated = [task for place in places for task in _forward(operators, inline, place, again=True)]
    backward = [task for place in reversed(places) for task in _backward(operators, inline, place)]
    trained = plan.training
    return Script(
        block.name, tuple(forward), (*repeated, *backward) if trained else (), tuple(gathers),
        tuple(again) if trained else (), tuple(reductions) if trained else (),
    )  # fmt: skip


def _place(move: Move) -> int:
    """The operator before which it is moved."""
    if move.reader >= 0:
        return move.reader
    made = move.source.partition(".")[0]
    return int(made) + 1 if made.isdigit() else 0


def _forward(
    operators: Sequence[Operator], inline: Mapping[int, Sequence[Move]], place: int, again: bool = False
) -> Iterator[Task]:
    for move in inline.get(place, ()):
        if move.again or not again:
            yield from _steps(move, _waited(move), "forward", MOVES)
    if place < len(operators) and (operators[place].again or not again):
        op = operators[place]
        yield from _timed(op, COMPUTE, op.forward, "again" if again else "forward")
        yield from _timed(op, MOVES, op.sent_forward, "again" if again else "forward")


def _backward(operators: Sequence[Operator], inline: Mapping[int, Sequence[Move]], place: int) -> Iterator[Task]:
    if place < len(operators):
        op = operators[place]
        yield from _timed(op, MOVES, op.communication - op.sent_forward, "backward")
        yield from _timed(op, COMPUTE, op.seconds - op.forward, "backward")
    for move in reversed(inline.get(place, ())):
        yield from _steps(move, _waited(move)[::-1], "backward", MOVES)


def _waited(move: Move) -> list[Mapping[str, Any]]:
    """The steps that are done where the tensor is read."""
    return [step for step in move.steps if not step.get("beside")]


def _timed(op: Operator, lane: str, seconds: float, phase: str) -> Iterator[Task]:
    if seconds > 0:
        yield Task(lane, op.target, seconds, {"module": op.module, "pass": phase, "split": ", ".join(op.choice)})


def _steps(move: Move, steps: Sequence[Mapping[str, Any]], phase: str, lane: str) -> Iterator[Task]:
    for step in steps:
        seconds = float(step.get(f"{phase}_seconds", 0.0))
        if seconds > 0:
            kind = step[phase] if step[phase] in COLLECTIVES else "copy"
            details = {"tensor": move.tensor, "at": move.at, "axes": step["axes"], "bytes": step.get("nbytes", 0)}
            yield Task(lane, f"{kind} {move.tensor}", seconds, {**details, "pass": phase})
