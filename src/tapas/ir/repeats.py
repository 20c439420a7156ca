"""Where the operators of a graph repeat: ranges that are equal in structure get equal signatures.

Module paths suggest where to look; where they say nothing, the distances between equal operators do.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby, pairwise
from operator import attrgetter
from typing import NamedTuple

from tapas.ir.graph import BLOCK, Graph, Op, own_tensors
from tapas.ir.tensors import NamesBelow
from tapas.util import picking

SMALLEST = 4  # operators: shorter repeats without a name are not worth a block

Range = tuple[int, int]
Key = tuple[Hashable, ...]


class Outside(NamedTuple):
    """What a range reads that is made outside of it."""

    weights: Sequence[str]  # its own
    ports: Sequence[str]
    constants: Sequence[str]


Reading = Callable[[Op], Sequence[str]]  # some of what an operator reads


class RepeatFinder:
    """Compares ranges of a graph's operators, and says where repeats may be."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.leaving = set(graph.outputs)
        self.outside: dict[Range, Outside] = {}
        self.keys, self.produced_at = graph.kinds, graph.produced_at
        self.leaf_of, self.shared = graph.leaf_of, graph.shared
        # For kinds of single operators: their signature, and how to get what they read from outside.
        self.single: dict[Key, tuple[int, tuple[Reading, ...]]] = {}
        self.numbers: dict[Key, int] = {}  # of what ranges look like

    def signature(self, start: int, stop: int) -> int:
        """A number that is equal for two ranges exactly if they are copies of one block."""
        if stop - start == 1:
            return self._of_one(start)
        return self._signature(start, stop)

    def _of_one(self, i: int) -> int:
        """The same for a single operator, mostly the call of a body: where its operands are of the kinds and read as
        widely as those of one before, all else is as it was there."""
        op = self.graph.ops[i]
        names = op.operands
        if len(set(names)) < len(names) or not self.leaving.isdisjoint(op.results):
            return self._signature(i, i + 1)
        kinds = tuple([name not in self.produced_at and self.leaf_of[name].kind for name in names])
        own = op.args[2] if op.target == BLOCK else ()
        key = self.keys[i], kinds, tuple(map(self.shared.__contains__, names)), own
        if key not in self.single:
            signature = self._signature(i, i + 1)
            self.single[key] = signature, tuple(_reading(op, some) for some in self.outside[i, i + 1])
        signature, (weights, ports, constants) = self.single[key]
        self.outside[i, i + 1] = Outside(weights(op), ports(op), constants(op))
        return signature

    def _signature(self, start: int, stop: int) -> int:
        number: dict[str, tuple[int, ...]] = {}
        outside: tuple[dict[str, None], ...] = ({}, {}, {})
        wiring: list[tuple[int, ...]] = []
        for i, op in enumerate(self.graph.ops[start:stop]):
            for name in (*own_tensors(op), *op.operands):
                code = number.get(name)
                if code is None:
                    kind = self.role(name, start, stop)
                    code = number[name] = (kind, len(outside[kind]))
                    outside[kind][name] = None
                wiring.append(code)
            for r, name in enumerate(op.results):
                number[name] = (3, i, r)
                if name in self.leaving:  # a copy that holds an output is a block of its own
                    wiring.append((4, i, r, *self.graph.leaving[name]))
        weights, constants, ports = map(tuple, outside)
        self.outside[start, stop] = Outside(weights, ports, constants)
        return self.numbers.setdefault((self.keys[start:stop], tuple(wiring)), len(self.numbers))

    def role(self, name: str, start: int, stop: int) -> int:
        """How a range sees a tensor made outside of it: 0 own weight, 1 constant, 2 port."""
        leaf = self.leaf_of.get(name)
        if leaf is None:
            return 2
        if leaf.kind != "parameter":
            return 1
        first, last = self.shared.get(name, (start, start))
        return 0 if start <= first and last < stop else 2

    # -- where to look -------------------------------------------------------------------------

    def named(self) -> Iterator[list[tuple[str, Range]]]:
        """For each numbered container (`model.layers`), outermost first, its members' ranges."""
        members: dict[str, dict[str, list[int]]] = defaultdict(dict)
        around: dict[str, tuple[tuple[str, str], ...]] = {"": ()}  # containers and their members that a path is in

        def numbered(path: str) -> tuple[tuple[str, str], ...]:
            parent, _, last = path.rpartition(".")
            if parent not in around:
                around[parent] = numbered(parent)
            return (*around[parent], (parent, path)) if last.isdigit() else around[parent]

        position = 0
        for module, run in groupby(self.graph.ops, attrgetter("module")):
            start, position = position, position + sum([1 for _ in run])
            for container, member in numbered(module):
                members[container].setdefault(member, [start, position])[1] = position
        for container in sorted(members, key=lambda c: (len(re.findall(r"\.\d+", "." + c)), c.count("."))):
            spans = sorted((start, stop, path) for path, (start, stop) in members[container].items())
            if all(before[1] <= after[0] for before, after in pairwise(spans)):
                yield [(path, (start, stop)) for start, stop, path in spans]

    def unnamed(self, free: Range) -> list[Range]:
        """The longest stretch of back-to-back repeats within a range, as ranges of its copies."""
        start, stop = free
        keys = self.keys[start:stop]
        last: dict[int, int] = {}
        distances: Counter[int] = Counter()
        for i, key in enumerate(keys):
            if key in last:
                distances[i - last[key]] += 1
            last[key] = i
        best: list[Range] = []
        for period, _ in distances.most_common(12):
            if period < SMALLEST:
                continue
            for low, high in _runs([a == b for a, b in zip(keys, keys[period:], strict=False)], period):
                copies = self._phase(start + low, start + high + period, period)
                if len(copies) * period > len(best) * (best[0][1] - best[0][0] if best else 0):
                    best = copies
        return best

    def _phase(self, low: int, high: int, period: int) -> list[Range]:
        """Where to cut a stretch of repeats: as many copies as possible, then as few ports as possible."""
        best: tuple[tuple[int, int], list[Range]] = ((0, 0), [])
        for offset in range(min(period, high - low - 2 * period + 1)):
            ranges = [(s, s + period) for s in range(low + offset, high - period + 1, period)]
            signatures = [self.signature(*r) for r in ranges]
            common, many = Counter(signatures).most_common(1)[0]
            if many < 2:
                continue
            chosen = [r for r, s in zip(ranges, signatures, strict=True) if s == common]
            ports = len(self.outside[chosen[0]].ports)
            if (many, -ports) > best[0]:
                best = ((many, -ports), chosen)
        return best[1]


def _reading(op: Op, names: Sequence[str]) -> Reading:
    """How to get, of an operator like this one, what these names are of it."""
    held = dict(zip(own_tensors(op), op.args[2] if op.target == BLOCK else (), strict=True))
    own = tuple(held[name] for name in names if name in held)
    others = picking([op.operands.index(name) for name in names if name not in held])
    if not own:
        return lambda op: others(op.operands)
    if len(own) == len(names):
        return lambda op: NamesBelow(op.module, own)
    return lambda op: (*NamesBelow(op.module, own), *others(op.operands))


def _runs(flags: Sequence[bool], least: int) -> Iterator[Range]:
    start = None
    for i, flag in enumerate((*flags, False)):
        if flag and start is None:
            start = i
        elif not flag and start is not None:
            if i - start >= least:
                yield start, i
            start = None
