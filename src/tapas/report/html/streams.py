"""The simulated step as data for its picture: copies that do the same share one list of tasks."""

from collections.abc import Sequence
from typing import Any

from tapas.plan.lanes import AHEAD, BEHIND, COMPUTE, MOVES
from tapas.plan.simulate import SimulatedStep, Task, Turn
from tapas.report.words import kind

SHOWN = (COMPUTE, MOVES, AHEAD, BEHIND)
TITLES = ("computation", "moves of activations, waited for", "weights gathered ahead", "gradients sent behind")


def streams_data(step: SimulatedStep | None, paths: Sequence[str]) -> dict[str, Any]:
    """`turns`: name, start, end, number of a list, and when its tasks start if they do not follow each other at
    once; `messages`: name, start, number of a list; `lists`: of tasks, each with lane, name and seconds."""
    if step is None:
        return {}
    lists: dict[int, tuple[int, tuple[Task, ...]]] = {}

    def number(tasks: tuple[Task, ...]) -> int:
        return lists.setdefault(id(tasks), (len(lists), tasks))[0]

    turns = [[_title(paths, t.copy, t.name, t.phase), t.start, t.end, number(t.tasks), _late(t)] for t in step.turns]
    messages = [[paths[m.copy], m.start, number(m.tasks)] for m in step.messages]
    listed = [[_task(task) for task in tasks] for _, tasks in lists.values()]
    when = {"seconds": step.seconds, "phases": _phases(step)}
    return {**when, "lanes": TITLES, "turns": turns, "messages": messages, "lists": listed}


def _phases(step: SimulatedStep) -> list[list[Any]]:
    """When each phase begins."""
    found: dict[str, float] = {}
    for turn in step.turns:
        found.setdefault(turn.phase, turn.start)
    return [[phase, start] for phase, start in found.items()]


def _late(turn: Turn) -> list[float]:
    return [round(start, 9) for start in turn.starts] if turn.held > 1e-9 else []


def _title(paths: Sequence[str], copy: int, name: str, phase: str) -> str:
    return "optimizer update" if phase == "update" else f"{paths[copy] or name}, {phase}"


def _task(task: Task) -> list[Any]:
    sent = "tensor" in task.details
    what, _, where = task.name.partition(" ") if sent else (kind(task.name), "", str(task.details.get("module", "")))
    short = ".".join(where.split(".")[-2 - sent :])  # its block is told apart
    text = f"{what.replace('_', '-')} of {short}" if sent else f"{short}: {what}" if short else what
    return [SHOWN.index(task.lane), text, task.seconds]
