"""Run-length encoding: of sequences whose items mostly repeat the one before, and of what copies choose."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from tapas.search.topology import BlockCopy, Topology, topology_of

Choices = tuple[tuple[int, ...], ...]  # per copy, the choice of each own variable

REMEMBERED = 8  # plans

T = TypeVar("T")


def run_lengths(items: Sequence[T]) -> list[tuple[T, int]]:
    """Items, each with how often it comes in a row.

    >>> run_lengths("aab")
    [('a', 2), ('b', 1)]
    """
    if items and items.count(items[0]) == len(items):  # mostly, and quickly told
        return [(items[0], len(items))]
    return [(item, len(list(same))) for item, same in groupby(items)]


def concatenate_runs(left: tuple[tuple[T, int], ...], right: tuple[tuple[T, int], ...]) -> tuple[tuple[T, int], ...]:
    """One sequence after the other.

    >>> concatenate_runs((("a", 2), ("b", 1)), (("b", 3),))
    (('a', 2), ('b', 4))
    """
    (item, times), (after, more) = left[-1], right[0]
    return (*left[:-1], (item, times + more), *right[1:]) if item == after else left + right


def adjacent_pairs(runs: Sequence[tuple[T, int]]) -> Iterator[tuple[T, T, int]]:
    """Items with the one before, and how often they come in a row.

    >>> list(adjacent_pairs([("a", 2), ("b", 1)]))
    [('a', 'a', 1), ('a', 'b', 1)]
    """
    for number, (item, times) in enumerate(runs):
        if number:
            yield runs[number - 1][0], item, 1
        if times > 1:
            yield item, item, times - 1


@dataclass(frozen=True, slots=True)
class ChoiceRun:
    """Copies in a row that choose the same, and whose ports do."""

    first: int
    times: int
    block: int
    own: tuple[int, ...]
    ports: tuple[int, ...]


_latest: list[tuple[Sequence[BlockCopy], Choices, list[ChoiceRun]]] = []


def choice_runs(copies: Sequence[BlockCopy], choices: Choices) -> list[ChoiceRun]:
    """All copies, in order; those of a chain are only looked at where choices change. What a plan costs, whether its
    copies are alike, and how much memory it needs are asked one after the other: the runs are found once."""
    for earlier, plan, runs in _latest:
        if plan is choices and earlier is copies:
            return runs
    runs: list[ChoiceRun] = []
    for c, times in _equal_copies(topology_of(copies), choices):
        block, ports = copies[c]
        runs.append(ChoiceRun(c, times, block, choices[c], tuple([choices[source][v] for source, v in ports])))
    _latest.insert(0, (copies, choices, runs))
    del _latest[REMEMBERED:]
    return runs


def count_choices(copies: Sequence[BlockCopy], choices: Choices) -> Counter[tuple[int, tuple[int, ...]]]:
    """How many copies of a block choose what.

    >>> count_choices([BlockCopy(0, ()), BlockCopy(1, ((0, 0),)), BlockCopy(1, ((1, 0),))], ((2,), (3,), (3,)))
    Counter({(1, (3,)): 2, (0, (2,)): 1})
    """
    counts: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for run in choice_runs(copies, choices):
        counts[run.block, run.own] += run.times
    return counts


def _equal_copies(topology: Topology, choices: Choices) -> Iterator[tuple[int, int]]:
    """Copies, and how many of them in a row are equal."""
    c = 0
    for chain in topology.chains:
        yield from ((before, 1) for before in range(c, chain.first + 1))
        c = chain.first + 1
        for _, _, times in adjacent_pairs(run_lengths(choices[chain.first : chain.stop])):
            yield c, times
            c += times
    yield from ((after, 1) for after in range(c, len(topology.copies)))
