"""Unique substructures: a graph becomes a few blocks and a list of copies.

Two stretches of operators are copies of one block only if they are equal in structure: operators,
arguments, shapes, dtypes and wiring, position by position. Module paths suggest where to look and what
to call the result; they prove nothing. Every operator, and every edge, belongs to exactly one copy:
an edge belongs to the copy that reads it.
"""

import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from tapas.ir.graph import BLOCK, Graph, Leaf, Leaves, Leaving, Op, Tensors
from tapas.ir.inline import inline_calls, inline_where
from tapas.ir.patterns import inside, matches
from tapas.ir.repeats import SMALLEST, Outside, Range, RepeatFinder
from tapas.util import Picking, picking


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
    leaving: dict[tuple[int, int], Leaving]  # what is wanted of them
    found: Mapping[str, str] = field(default_factory=dict[str, str])  # as in the graph

    @property
    def leaves(self) -> Iterable[Leaf]:
        return self.leaf_of.values()

    @cached_property
    def inputs(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf, _ in self.leaf_of.distinct if leaf.kind == "input")

    @cached_property
    def parameters(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.kind == "parameter")

    @cached_property
    def training(self) -> bool:
        return any(self.tensors[leaf.tensor].differentiable for leaf, _ in self.leaf_of.distinct)

    @cached_property
    def _copies(self) -> dict[int, list[int]]:
        numbers: dict[int, list[int]] = defaultdict(list)
        for number, copy in enumerate(self.copies):
            numbers[copy.block].append(number)
        return numbers

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


def fold(graph: Graph) -> Folded:
    finder = RepeatFinder(graph)
    total = len(graph.ops)
    taken: dict[Range, tuple[int, str]] = {}  # range -> signature, path
    covered = bytearray(total)  # operators in these ranges

    for members in finder.named():
        free = [(path, r) for path, r in members if not any(covered[slice(*r)])]
        signatures = [(path, r, finder.signature(*r)) for path, r in free]
        counts = Counter(signature for _, _, signature in signatures)
        for path, r, signature in signatures:
            if counts[signature] > 1:
                taken[r] = signature, path
                covered[slice(*r)] = bytes([1]) * (r[1] - r[0])
    for gap in list(_gaps(taken, total)):
        waiting = [gap]
        while waiting:
            low, high = waiting.pop()
            repeats = finder.unnamed((low, high)) if high - low >= 2 * SMALLEST else []
            for r in repeats:
                taken[r] = finder.signature(*r), ""
            if repeats:
                waiting += [g for g in ((low, repeats[0][0]), (repeats[-1][1], high)) if g[0] < g[1]]
    lonely = {i for gap in _gaps(taken, total) for i in range(*gap) if graph.ops[i].target == BLOCK}
    if lonely:  # within what is a copy of nothing, smaller parts may repeat
        return fold(inline_where(graph, lambda i, _: i in lonely))
    for gap in _gaps(taken, total):
        finder.signature(*gap)
        taken[gap] = -1 - gap[0], ""  # unique
    return _assemble(finder, sorted((r, *what) for r, what in taken.items()))


def _gaps(taken: Iterable[Range], total: int) -> Iterator[Range]:
    position = 0
    for start, stop in sorted(taken):
        if position < start:
            yield position, start
        position = stop
    if position < total:
        yield position, total


def _assemble(finder: RepeatFinder, ranges: list[tuple[Range, int, str]]) -> Folded:
    graph = finder.graph
    starts = [start for (start, _), _, _ in ranges]
    outside = [finder.outside[r] for r, _, _ in ranges]
    wanted = {name for _, ports, _ in outside for name in ports}
    shared = _shared(graph, wanted)
    first = 1 if shared else 0

    number_of: dict[int, int] = {}
    block_of = [number_of.setdefault(signature, len(number_of)) for _, signature, _ in ranges]
    # positions (operator, result) read outside of any copy of a block: the same exports for all copies
    exported: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for name in wanted | finder.leaving:
        if name in graph.produced_at:
            i = graph.produced_at[name]
            home = bisect(starts, i) - 1
            exported[block_of[home]].add((i - starts[home], graph.ops[i].results.index(name)))
    uses = [
        _Uses(graph, *next(r for r, b in zip(ranges, block_of, strict=True) if b == n)[0]) for n in number_of.values()
    ]
    places = {block: uses[block].exports(exported[block]) for block in number_of.values()}
    exports_at: dict[str, tuple[int, int]] = {name: (0, i) for i, name in enumerate(shared)}
    for copy, (block, start) in enumerate(zip(block_of, starts, strict=True), first):
        for e, (i, r) in enumerate(places[block]):
            exports_at[graph.ops[start + i].results[r]] = (copy, e)

    blocks: list[Block] = [Block("shared weights", (), (), shared, (), shared)] if shared else []
    copies: list[Copy] = [Copy(0, "", (), shared, ())] if shared else []
    position: dict[int, int] = {}  # of a block in the result
    names = _names(graph, ranges, block_of)
    for block, ((start, stop), _, path), around in zip(block_of, ranges, outside, strict=True):
        weights, ports, constants = uses[block].ordered(around)
        if block not in position:
            position[block] = len(blocks)
            ops = graph.ops[start:stop]
            exports = tuple(ops[i].results[r] for i, r in places[block])
            written = uses[block].ops
            blocks.append(Block(names[block], written, tuple(ports), tuple(weights), tuple(constants), exports))
        copies.append(Copy(position[block], path, tuple([exports_at[n] for n in ports]), weights, constants))
    outputs = tuple(exports_at[name] for name in graph.outputs if name in exports_at)
    leaving = {exports_at[name]: what for name, what in graph.leaving.items() if name in exports_at}
    tensors = dict(graph.tensors.explicit)
    for use in uses:
        tensors |= use.inner
    merged = Tensors(tensors, graph.tensors.families)
    found = graph.found or {}
    return Folded(graph.name, merged, graph.leaf_of, tuple(blocks), tuple(copies), outputs, leaving, found)


class _Uses:
    """The operators of a block, and all that it reads and exports in the order in which they do so: a graph that has
    bodies and one that is written out are folded to the same."""

    def __init__(self, graph: Graph, start: int, stop: int) -> None:
        self.made = graph.ops[start:stop]
        self.ops, self.inner = inline_calls(graph, self.made)
        self.rank: dict[str, int] = {}
        for op in self.ops:
            for name in (*op.operands, *op.results):
                self.rank.setdefault(name, len(self.rank))
        self.picks: list[Picking | None] | None = None  # of weights, ports and constants; None: they are in order

    def exports(self, places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        return sorted(places, key=lambda place: self.rank[self.made[place[0]].results[place[1]]])

    def ordered(self, around: Outside) -> Outside:
        """What a copy reads; the first one that is asked for tells the order, by whose names the block is written."""
        if self.picks is None:
            orders = [sorted(range(len(names)), key=lambda i: self.rank[names[i]]) for names in around]
            self.picks = [None if order == [*range(len(order))] else picking(order) for order in orders]
        return Outside(
            *[names if pick is None else pick(names) for names, pick in zip(around, self.picks, strict=True)]
        )


def _shared(graph: Graph, wanted: set[str]) -> tuple[str, ...]:
    """Leaves that several copies read, as the model has them."""
    return graph.leaf_of.in_model_order([name for name in wanted if name not in graph.produced_at])


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


def split_copies(folded: Folded, patterns: Sequence[str]) -> Folded:
    """Part copies that are told apart by patterns of names, such as `model.layers.3.*`: copies of one
    block match the same patterns at the same places."""
    if not patterns:
        return folded
    blocks: list[Block] = []
    copies: list[Copy] = []
    number: dict[tuple[int, tuple[bool, ...]], int] = {}
    for copy in folded.copies:
        block = _as_copy(folded, folded.blocks[copy.block], copy) if copy.path else folded.blocks[copy.block]
        names = [op.module for op in block.ops]
        names += [path for name in block.weights for path in folded.leaf_of[name].paths]
        tag = tuple(matches(name, pattern) for pattern in patterns for name in names)
        if (copy.block, tag) not in number:
            number[copy.block, tag] = len(blocks)
            blocks.append(block)
        copies.append(copy._replace(block=number[copy.block, tag]))
    return replace(folded, blocks=tuple(blocks), copies=tuple(copies))


def _as_copy(folded: Folded, block: Block, copy: Copy) -> Block:
    """The block by the names of another copy (its inner tensors keep theirs)."""
    own = next(c for c in folded.copies if folded.blocks[c.block] is block)
    renamed = dict(zip((*block.weights, *block.constants), (*copy.weights, *copy.constants), strict=True))
    ops = tuple(
        replace(
            op,
            operands=tuple(renamed.get(name, name) for name in op.operands),
            module=inside(op.module, own.path, copy.path),
        )
        for op in block.ops
    )
    return replace(block, ops=ops, weights=copy.weights, constants=copy.constants)
