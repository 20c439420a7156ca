"""Unique substructures: a graph becomes a few blocks and a list of copies.

Two stretches of operators are copies of one block only if they are equal in structure: operators,
arguments, shapes, dtypes and wiring, position by position. Module paths suggest where to look and what
to call the result; they prove nothing. Every operator, and every edge, belongs to exactly one copy:
an edge belongs to the copy that reads it.
"""

import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from operator import attrgetter
from typing import NamedTuple

from tapas.ir.graph import BLOCK, Graph, Leaf, Leaves, Op, Tensors, held_by
from tapas.ir.inline import with_bodies
from tapas.ir.tensors import Below
from tapas.util import picking

SMALLEST = 4  # operators: shorter repeats without a name are not worth a block


@dataclass(frozen=True)
class Block:
    """A substructure, by the names of its first copy."""

    name: str
    ops: tuple[Op, ...]
    ports: tuple[str, ...]  # tensors of earlier copies that it reads
    weights: tuple[str, ...]  # parameters that no other copy reads
    constants: tuple[str, ...]  # inputs, buffers and constants that it reads
    exports: tuple[str, ...]  # its tensors that later copies read, or that leave the graph


class Copy(NamedTuple):  # as many as the model is deep: a tuple is made in no time
    block: int
    path: str
    ports: tuple[tuple[int, int], ...]  # for each port of the block: copy number, export number
    weights: Sequence[str]
    constants: Sequence[str]


@dataclass(frozen=True)
class Folded:
    """What the later stages work on. A capture that knows the blocks can make one directly: only the
    first copy of each block needs operators and shapes."""

    name: str
    tensors: Tensors
    leaf_of: Leaves  # by tensor
    blocks: tuple[Block, ...]
    copies: tuple[Copy, ...]
    outputs: tuple[tuple[int, int], ...]  # copy number, export number
    loss: tuple[int, int] | None

    @property
    def leaves(self) -> Iterable[Leaf]:
        return self.leaf_of.values()

    @cached_property
    def inputs(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf, _ in self.leaf_of.alike if leaf.kind == "input")

    @cached_property
    def parameters(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.kind == "parameter")

    @cached_property
    def training(self) -> bool:
        return any(self.tensors[leaf.tensor].differentiable for leaf, _ in self.leaf_of.alike)

    @cached_property
    def _copies(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for number, copy in enumerate(self.copies):
            found[copy.block].append(number)
        return found

    def copies_of(self, block: int) -> list[int]:
        return self._copies[block]

    @property
    def operators(self) -> int:
        """Before folding."""
        return sum(len(self.copies_of(number)) * len(block.ops) for number, block in enumerate(self.blocks))

    @property
    def unique_operators(self) -> int:
        return sum(len(block.ops) for block in self.blocks)

    def __str__(self) -> str:
        lines = [f"folded {self.name}: {self.operators} operators, {self.unique_operators} unique"]
        for number, block in enumerate(self.blocks):
            copies = self.copies_of(number)
            lines.append(
                f"  {block.name}: {len(copies)} x {len(block.ops)} operators, "
                f"reads {', '.join(block.ports) or 'nothing'}, exports {', '.join(block.exports) or 'nothing'}"
            )
        return "\n".join(lines)


Range = tuple[int, int]


class _Outside(NamedTuple):
    """What a range reads that is made outside of it."""

    weights: Sequence[str]  # its own
    ports: Sequence[str]
    constants: Sequence[str]


Reading = Callable[[Op], Sequence[str]]  # some of what an operator reads


class _Folder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.leaving = set(graph.outputs)
        self.outside: dict[Range, _Outside] = {}
        self.keys, self.made_at = graph.kinds, graph.made_at
        self.leaf_of, self.shared = graph.leaf_of, graph.shared
        self.known: dict[tuple, tuple[int, tuple[Reading, ...]]] = {}
        self.numbers: dict[tuple, int] = {}  # of what ranges look like

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
        kinds = tuple([name not in self.made_at and self.leaf_of[name].kind for name in names])
        own = op.args[2] if op.target == BLOCK else ()
        key = self.keys[i], kinds, tuple(map(self.shared.__contains__, names)), own
        if key not in self.known:
            signature = self._signature(i, i + 1)
            self.known[key] = signature, tuple(_reading(op, some) for some in self.outside[i, i + 1])
        signature, (weights, ports, constants) = self.known[key]
        self.outside[i, i + 1] = _Outside(weights(op), ports(op), constants(op))
        return signature

    def _signature(self, start: int, stop: int) -> int:
        number: dict[str, tuple] = {}
        outside: tuple[dict[str, None], ...] = ({}, {}, {})
        wiring: list[tuple] = []
        for i, op in enumerate(self.graph.ops[start:stop]):
            for name in (*held_by(op), *op.operands):
                code = number.get(name)
                if code is None:
                    kind = self.role(name, start, stop)
                    code = number[name] = (kind, len(outside[kind]))
                    outside[kind][name] = None
                wiring.append(code)
            for r, name in enumerate(op.results):
                number[name] = (3, i, r)
                if name in self.leaving:  # a copy that holds an output is a block of its own
                    wiring.append((4, i, r, name == self.graph.loss))
        weights, constants, ports = map(tuple, outside)
        self.outside[start, stop] = _Outside(weights, ports, constants)
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
        found: dict[str, dict[str, list[int]]] = defaultdict(dict)
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
                found[container].setdefault(member, [start, position])[1] = position
        for container in sorted(found, key=lambda c: (len(re.findall(r"\.\d+", "." + c)), c.count("."))):
            spans = sorted((start, stop, path) for path, (start, stop) in found[container].items())
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
                found = self._phase(start + low, start + high + period, period)
                if len(found) * period > len(best) * (best[0][1] - best[0][0] if best else 0):
                    best = found
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
    held = dict(zip(held_by(op), op.args[2] if op.target == BLOCK else (), strict=True))
    own = tuple(held[name] for name in names if name in held)
    others = picking([op.operands.index(name) for name in names if name not in held])
    if not own:
        return lambda op: others(op.operands)
    if len(own) == len(names):
        return lambda op: Below(op.module, own)
    return lambda op: (*Below(op.module, own), *others(op.operands))


def _runs(flags: Sequence[bool], least: int) -> Iterator[Range]:
    start = None
    for i, flag in enumerate((*flags, False)):
        if flag and start is None:
            start = i
        elif not flag and start is not None:
            if i - start >= least:
                yield start, i
            start = None


def fold(graph: Graph) -> Folded:
    folder = _Folder(graph)
    total = len(graph.ops)
    taken: dict[Range, tuple[int, str]] = {}  # range -> signature, path
    covered = bytearray(total)  # operators in these ranges

    for members in folder.named():
        free = [(path, r) for path, r in members if not any(covered[slice(*r)])]
        signatures = [(path, r, folder.signature(*r)) for path, r in free]
        counts = Counter(signature for _, _, signature in signatures)
        for path, r, signature in signatures:
            if counts[signature] > 1:
                taken[r] = signature, path
                covered[slice(*r)] = bytes([1]) * (r[1] - r[0])
    for gap in list(_gaps(taken, total)):
        waiting = [gap]
        while waiting:
            low, high = waiting.pop()
            found = folder.unnamed((low, high)) if high - low >= 2 * SMALLEST else []
            for r in found:
                taken[r] = folder.signature(*r), ""
            if found:
                waiting += [g for g in ((low, found[0][0]), (found[-1][1], high)) if g[0] < g[1]]
    for gap in _gaps(taken, total):
        folder.signature(*gap)
        taken[gap] = -1 - gap[0], ""  # unique
    return _assemble(folder, sorted((r, *what) for r, what in taken.items()))


def _gaps(taken: Iterable[Range], total: int) -> Iterator[Range]:
    position = 0
    for start, stop in sorted(taken):
        if position < start:
            yield position, start
        position = stop
    if position < total:
        yield position, total


def _assemble(folder: _Folder, ranges: list[tuple[Range, int, str]]) -> Folded:
    graph = folder.graph
    starts = [start for (start, _), _, _ in ranges]
    outside = [folder.outside[r] for r, _, _ in ranges]
    wanted = {name for _, ports, _ in outside for name in ports}
    shared = _shared(graph, wanted)
    first = 1 if shared else 0

    number_of: dict[int, int] = {}
    block_of = [number_of.setdefault(signature, len(number_of)) for _, signature, _ in ranges]
    # positions (operator, result) read outside of any copy of a block: the same exports for all copies
    exported: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for name in wanted | folder.leaving:
        if name in graph.made_at:
            i = graph.made_at[name]
            home = bisect(starts, i) - 1
            exported[block_of[home]].add((i - starts[home], graph.ops[i].results.index(name)))
    places = {block: sorted(exported[block]) for block in number_of.values()}
    exports_at: dict[str, tuple[int, int]] = {name: (0, i) for i, name in enumerate(shared)}
    for copy, (block, start) in enumerate(zip(block_of, starts, strict=True), first):
        for e, (i, r) in enumerate(places[block]):
            exports_at[graph.ops[start + i].results[r]] = (copy, e)

    blocks: list[Block] = [Block("shared weights", (), (), shared, (), shared)] if shared else []
    copies: list[Copy] = [Copy(0, "", (), shared, ())] if shared else []
    seen: dict[int, int] = {}
    names = _names(graph, ranges, block_of)
    for block, ((start, stop), _, path), (weights, ports, constants) in zip(block_of, ranges, outside, strict=True):
        if block not in seen:
            seen[block] = len(blocks)
            ops = graph.ops[start:stop]
            exports = tuple(ops[i].results[r] for i, r in places[block])
            written = with_bodies(graph, ops)
            blocks.append(Block(names[block], written, tuple(ports), tuple(weights), tuple(constants), exports))
        copies.append(Copy(seen[block], path, tuple([exports_at[n] for n in ports]), weights, constants))
    outputs = tuple(exports_at[name] for name in graph.outputs if name in exports_at)
    loss = exports_at.get(graph.loss) if graph.loss else None
    tensors = dict(graph.tensors.known)
    for body in graph.bodies:
        tensors.update((name, tensor) for name, tensor in body.tensors.items() if name not in body.inputs)
    known = Tensors(tensors, graph.tensors.homes), graph.leaf_of
    return Folded(graph.name, *known, tuple(blocks), tuple(copies), outputs, loss)


def _shared(graph: Graph, wanted: set[str]) -> tuple[str, ...]:
    """Leaves that several copies read, as the model has them."""
    return graph.leaf_of.arranged([name for name in wanted if name not in graph.made_at])


def _names(graph: Graph, ranges: list[tuple[Range, int, str]], block_of: list[int]) -> dict[int, str]:
    """`model.layers.*` for a block whose copies sit in one container, else where its operators come from."""
    paths: dict[int, list[str]] = defaultdict(list)
    for block, (_, _, path) in zip(block_of, ranges, strict=True):
        paths[block].append(path)
    names: dict[int, str] = {}
    used: Counter[str] = Counter()
    for block, ((start, stop), _, path) in zip(block_of, ranges, strict=True):
        if block in names:
            continue
        if path:
            name = re.sub(r"\d+$", "*", path)
        else:
            modules = [op.module for op in graph.ops[start:stop]]
            ends = list(dict.fromkeys(m for m in (modules[0], modules[-1]) if m))
            name = " .. ".join(ends) or "model"
        used[name] += 1
        names[block] = name if used[name] == 1 else f"{name} #{used[name]}"
    return names
