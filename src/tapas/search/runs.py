"""What copies choose, as runs of copies that do the same."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tapas.search.repeats import counted, neighbours
from tapas.search.wires import BlockCopy
from tapas.search.wiring import Topology, topology_of

Choices = tuple[tuple[int, ...], ...]  # per copy, the choice of each own variable

REMEMBERED = 8  # plans


@dataclass(frozen=True, slots=True)
class ChoiceRun:
    """Copies in a row that choose the same and find the same around them."""

    first: int
    times: int
    block: int
    own: tuple[int, ...]
    ports: tuple[int, ...]


_latest: list[tuple[Sequence[BlockCopy], Choices, list[ChoiceRun]]] = []


def choice_runs(copies: Sequence[BlockCopy], choices: Choices) -> list[ChoiceRun]:
    """All copies, in order; those of a chain are only looked at where choices change. What a plan costs, whether its
    copies are alike, and how much memory it needs are asked one after the other: the runs are found once."""
    for known, plan, found in _latest:
        if plan is choices and known is copies:
            return found
    found = []
    for c, times in _stretches(topology_of(copies), choices):
        block, ports = copies[c]
        found.append(ChoiceRun(c, times, block, choices[c], tuple([choices[source][v] for source, v in ports])))
    _latest.insert(0, (copies, choices, found))
    del _latest[REMEMBERED:]
    return found


def count_choices(copies: Sequence[BlockCopy], choices: Choices) -> Counter[tuple[int, tuple[int, ...]]]:
    """How many copies of a block choose what."""
    found: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for run in choice_runs(copies, choices):
        found[run.block, run.own] += run.times
    return found


def _stretches(wiring: Topology, choices: Choices) -> Iterator[tuple[int, int]]:
    c = 0
    for chain in wiring.chains:
        yield from ((before, 1) for before in range(c, chain.first + 1))
        c = chain.first + 1
        for _, _, times in neighbours(counted(choices[chain.first : chain.stop])):
            yield c, times
            c += times
    yield from ((after, 1) for after in range(c, len(wiring.copies)))
