"""Steps between states, and the order in which one walk takes all of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    before: int  # states
    after: int
    what: int
    times: int


def unreached(start: int, steps: Sequence[Step]) -> set[int]:
    """The states that steps are at but do not get to from the start; those that hang together with one of them."""
    nexts: dict[int, set[int]] = defaultdict(set)
    for step in steps:
        nexts[step.before].add(step.after)
    known = _closed({start}, nexts)
    left = sorted(nexts.keys() - known)
    return _closed({left[0]}, nexts) - known if left else set()


def _closed(states: set[int], nexts: dict[int, set[int]]) -> set[int]:
    waiting = list(states)
    while waiting:
        for state in nexts.get(waiting.pop(), ()):
            if state not in states:
                states.add(state)
                waiting.append(state)
    return states


def walk(start: int, steps: Sequence[Step]) -> list[int]:
    """What each step of the walk is (Hierholzer's way). Steps that stay where they are come as soon as possible,
    equal ones together, in the order given."""
    stays: dict[int, list[int]] = defaultdict(list)
    leaves: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for step in reversed(steps):
        if step.before != step.after:
            leaves[step.before] += [(step.after, step.what)] * step.times
    for step in steps:
        if step.before == step.after:
            stays[step.before] += [step.what] * step.times
    stack: list[tuple[int, int | None]] = [(start, None)]
    turned: list[tuple[int, int | None]] = []  # states with the step that led there, last first
    while stack:
        state = stack[-1][0]
        if leaves[state]:
            stack.append(leaves[state].pop())
        else:
            turned.append(stack.pop())
    found: list[int] = []
    for state, what in reversed(turned):
        found += [] if what is None else [what]
        found += stays.pop(state, [])
    return found
