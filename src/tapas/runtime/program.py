"""The program that one rank runs: the blocks of the model on local shapes, called copy by copy.

Copies that do the same call the same module. It gets what is theirs as arguments, so that nothing in it, and
nothing that torch.compile makes of it, is tied to one of them.
"""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from tapas.ir.fold import Copy, Folded
from tapas.ir.graph import Graph
from tapas.ir.interpreter import arguments, resolve, returns_list
from tapas.plan.assignment import Assignment, resident_layouts
from tapas.rules.base import RECOMPUTED, gathered_again
from tapas.runtime.ahead import GatheredCall
from tapas.runtime.block import Constant, Port, Weight, WrittenBlock, write_block
from tapas.runtime.calls import Draft, DrawnCall, OwnPrecision, Recomputed
from tapas.runtime.collectives import Rank
from tapas.runtime.gathered import GatheredWeight, Unit
from tapas.runtime.moves import Step
from tapas.runtime.parts import Cut
from tapas.sharding.layout import Layout, R


@dataclass
class Left:
    """What a program leaves to its caller."""

    joint: bool = True  # whether the caller can go over several axes at once
    sums: dict[str, tuple[int, ...]] = field(default_factory=dict)  # parameter -> axes over which to sum its gradient
    units: list[Unit] = field(default_factory=list)  # weights to be gathered, in the order of the calls
    used: list[str] = field(default_factory=list)  # parameters, in the order of their use
    cuts: dict[str, Cut] = field(default_factory=dict)  # input -> the part of it that the program takes

    def takes(self, step: Step) -> bool:
        return self.joint or len(step.move.axes) == 1


class _ProgramWriter:
    def __init__(self, graph: Graph, folded: Folded, assignment: Assignment, rank: Rank, left: Left | None) -> None:
        self.graph, self.folded, self.assignment, self.rank, self.left = graph, folded, assignment, rank, left
        self.draft = Draft()
        self.whole: dict[str, fx.Node] = {}  # leaves
        self.cuts: dict[tuple[str, Layout], fx.Node] = {}
        self.exports: dict[tuple[int, int], fx.Node] = {}  # by copy and export
        self.outputs: dict[tuple[int, int], fx.Node] = {}
        self.read = self.read_later()
        self.resident = resident_layouts(assignment, folded)  # of these the caller has a part
        self.operators = 0  # called so far

    def leaves(self) -> None:
        for leaf in self.graph.given_leaves:
            self.whole[leaf.tensor] = self.draft.placeholder("leaf_" + re.sub(r"\W", "_", leaf.tensor))
        wanted = [leaf.tensor for leaf in self.graph.leaves if leaf.tensor not in self.whole]
        if wanted:
            self.whole |= self.prelude(wanted)

    def prelude(self, wanted: list[str]) -> dict[str, fx.Node]:
        """What is computed from constants, in a module of its own."""
        draft, values, given = Draft(), dict[str, fx.Node](), list[fx.Node]()
        for op in self.graph.prelude:
            for name in op.operands:
                if name not in values:
                    values[name] = draft.placeholder(f"given_{len(given)}")
                    given.append(self.whole[name])
            args, kwargs = arguments(op.args, op.kwargs, [values[name] for name in op.operands])
            if not op.operands:
                kwargs["device"] = self.rank.device
            function = resolve(op.target)
            if op.own_precision:
                function = OwnPrecision(function, self.rank.device)
            node = draft.call(function, args, kwargs)
            one = len(op.results) == 1 and not returns_list(op.target)
            results = [node] if one else draft.unpacked(node, len(op.results))
            values.update(zip(op.results, results, strict=True))
        node = self.draft.module(draft.finished([values[name] for name in wanted], "Prelude"), *given)
        return dict(zip(wanted, self.draft.unpacked(node, len(wanted)), strict=True))

    def cut(self, name: str, layout: Layout) -> fx.Node:
        """A constant or an input as operators want it; once for all copies."""
        if (name, layout) not in self.cuts:
            node = self.whole[name]
            whole = name in self.resident or all(state == R for state in layout)
            self.cuts[name, layout] = node if whole else self.draft.module(Cut(layout, self.rank), node)
        return self.cuts[name, layout]

    def read_later(self) -> dict[int, list[int]]:
        """For each block the exports that later copies read."""
        read: dict[int, set[int]] = defaultdict(set)
        for c, e in (port for copy in self.folded.copies for port in copy.ports):
            read[self.folded.copies[c].block].add(e)
        return {block: sorted(exports) for block, exports in read.items()}

    def block(self, number: int, decision: int) -> WrittenBlock:
        outside = self.left.takes if self.left is not None else lambda step: False
        decided, exports = self.assignment.decisions[decision], self.read.get(number, [])
        block, tensors = self.folded.blocks[number], self.folded.tensors
        path = next(copy.path for copy in self.folded.copies if copy.block == number)
        written, pieces = self.written_by(number), self.assignment.pieces
        made = write_block(block, tensors, decided, exports, self.rank, path, outside, written, pieces)
        module, draws, journal = made.module, self.rank.draws, self.rank.journal
        if decided.recompute in RECOMPUTED:
            module = Recomputed(module, decided.recompute, made.products, draws, made.streams, journal)
        if made.streams:
            module = DrawnCall(module, made.streams[0], draws)
        weights = [what.number if isinstance(what, Weight) else None for what in made.arguments]
        if places := [place for place, weight in enumerate(weights) if weight in made.gathers]:
            module = GatheredCall(module, places)
        return replace(made, module=module)

    def written_by(self, number: int) -> frozenset[int]:
        """Of a block's constants those that each of its copies may write to: buffers that the model writes to, and that
        nobody else reads."""
        buffers, reads = {buffer for buffer, _ in self.graph.writes}, self.reads
        copies = [copy for copy in self.folded.copies if copy.block == number]
        constants = range(len(self.folded.blocks[number].constants))
        own = (i for i in constants if all(reads[c.constants[i]] == 1 and c.constants[i] in buffers for c in copies))
        return frozenset(own)

    @cached_property
    def reads(self) -> Counter[str]:
        """How often inputs, buffers and constants are read, or returned as they are."""
        found = Counter(name for op in self.graph.prelude for name in op.operands) + Counter(self.graph.outputs)
        inside = [Counter(name for op in block.ops for name in op.operands) for block in self.folded.blocks]
        for copy in self.folded.copies:
            block = self.folded.blocks[copy.block]
            for own, name in zip(block.constants, copy.constants, strict=True):
                found[name] += inside[copy.block][own]
        return found

    def copy(self, number: int, copy: Copy, block: WrittenBlock) -> None:
        """One call of a block."""
        given: list[fx.Node] = []
        for what in block.arguments:
            match what:
                case Port():
                    given.append(self.exports[copy.ports[what.number]])
                case Weight() if what.number not in block.gathers:
                    given.append(self.whole[copy.weights[what.number]])
                case Weight():
                    pass  # the caller has it
                case Constant():
                    given.append(self.cut(copy.constants[what.number], what.layout))
        if self.left is not None:
            self.leave(self.left, number, copy, block)
        gathered = [self.gathered, len(self.left.units) - 1] if self.left is not None and block.gathers else []
        self.draft.call(self.rank.journal.enter, (copy.path,), {})
        node = self.draft.module(block.module, *gathered, *given)
        node.meta["first"] = self.operators
        self.operators += len(self.folded.blocks[copy.block].ops)
        exports, outputs = self.read.get(copy.block, []), self.assignment.decision(number).outputs
        results = self.draft.unpacked(node, len(exports) + len(outputs))
        self.exports |= {(number, e): result for e, result in zip(exports, results, strict=False)}
        for output, result in zip(outputs, results[len(exports) :], strict=True):
            self.outputs[number, output.export] = result

    def leave(self, left: Left, number: int, copy: Copy, block: WrittenBlock) -> None:
        """Note what the caller has to do about the weights of a call."""
        weights = [what.number for what in block.arguments if isinstance(what, Weight)]
        left.used += [copy.weights[weight] for weight in weights]
        left.sums |= {copy.weights[weight]: step.back.axes for weight, step in block.sums.items()}
        if block.gathers:
            folded, mode = self.folded.blocks[copy.block], self.assignment.decision(number).recompute
            left.units.append(tuple(
                GatheredWeight(
                    copy.weights[weight], block.gathers[weight],
                    gathered_again(mode, folded.weights[weight] in folded.exports, weight in block.saved),
                )
                for weight in weights if weight in block.gathers
            ))  # fmt: skip

    def write(self) -> fx.GraphModule:
        self.leaves()
        if self.left is not None:
            self.gathered = self.draft.placeholder("gathered")  # a ForwardPass
        written: dict[tuple[int, int], WrittenBlock] = {}
        for number, (copy, decision) in enumerate(zip(self.folded.copies, self.assignment.copies, strict=True)):
            if (copy.block, decision) not in written:
                written[copy.block, decision] = self.block(copy.block, decision)
            self.copy(number, copy, written[copy.block, decision])
        outputs = [self.outputs[place] for place in self.folded.outputs]
        if self.left is not None:
            self.leave_cuts(self.left)
        return self.draft.finished(outputs, "Program")

    def leave_cuts(self, left: Left) -> None:
        """An input of which all operators read the same part need not come whole."""
        for leaf in self.graph.leaves:
            node = self.whole[leaf.tensor]
            if leaf.kind == "input" and len(node.users) == 1:
                (cut,) = node.users
                module = self.draft.root.get_submodule(str(cut.target)) if cut.op == "call_module" else None
                if isinstance(module, Cut):
                    cut.replace_all_uses_with(node)
                    self.draft.graph.erase_node(cut)
                    left.cuts[leaf.tensor] = module


def write_program(
    graph: Graph, folded: Folded, assignment: Assignment, rank: Rank, left: Left | None = None
) -> fx.GraphModule:
    """A module that takes the leaves (in the graph's order) and returns the local parts of the outputs.

    `folded` is the graph, folded: the assignment is for its copies. With `left` the program leaves some work to the
    caller, which is noted there, and takes a ForwardPass besides; without, it does all of it.
    """
    return _ProgramWriter(graph, folded, assignment, rank, left).write()
