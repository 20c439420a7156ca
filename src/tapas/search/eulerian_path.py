"""The order in which one path takes all of some transitions between states: an Eulerian path of a multigraph."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transition:
    before: int  # states
    after: int
    label: int
    times: int


def unreached_states(start: int, transitions: Sequence[Transition]) -> set[int]:
    """The states that transitions leave but that are not reached from the start; those connected to one of them.

    >>> sorted(unreached_states(0, [Transition(0, 0, 0, 3), Transition(1, 2, 1, 1), Transition(2, 1, 2, 1)]))
    [1, 2]
    """
    successors: dict[int, set[int]] = defaultdict(set)
    for transition in transitions:
        successors[transition.before].add(transition.after)
    reached = _reachable(start, successors)
    left = sorted(successors.keys() - reached)
    return _reachable(left[0], successors) - reached if left else set()


def _reachable(start: int, successors: dict[int, set[int]]) -> set[int]:
    states, waiting = {start}, [start]
    while waiting:
        for state in successors.get(waiting.pop(), ()):
            if state not in states:
                states.add(state)
                waiting.append(state)
    return states


def eulerian_path(start: int, transitions: Sequence[Transition]) -> list[int]:
    """The labels in the order of the path (Hierholzer's algorithm). Transitions that stay where they are come as soon
    as possible, equal ones together, in the order given.

    >>> eulerian_path(0, [Transition(0, 1, 7, 2), Transition(1, 0, 8, 1), Transition(1, 1, 9, 3)])
    [7, 9, 9, 9, 8, 7]
    """
    loops: dict[int, list[int]] = defaultdict(list)
    leaving: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for edge in reversed(transitions):
        if edge.before != edge.after:
            leaving[edge.before] += [(edge.after, edge.label)] * edge.times
    for edge in transitions:
        if edge.before == edge.after:
            loops[edge.before] += [edge.label] * edge.times
    stack: list[tuple[int, int | None]] = [(start, None)]
    backwards: list[tuple[int, int | None]] = []  # states with the transition that led there, last first
    while stack:
        state = stack[-1][0]
        if leaving[state]:
            stack.append(leaving[state].pop())
        else:
            backwards.append(stack.pop())
    labels: list[int] = []
    for state, label in reversed(backwards):
        labels += [] if label is None else [label]
        labels += loops.pop(state, [])
    return labels
