"""The program that one rank runs: the blocks of the model on local shapes, called copy by copy.

Copies that do the same call the same module. It gets what is theirs as arguments, so that nothing in it, and
nothing that torch.compile makes of it, is tied to one of them.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace

from torch import fx

from tapas.ir.fold import Copy
from tapas.ir.graph import Graph
from tapas.ir.interpreter import argument, resolve
from tapas.planner.solution import Group, Solution
from tapas.problem.problem import KEEP, Problem
from tapas.runtime.block import Constant, Port, Weight, WrittenBlock, write_block
from tapas.runtime.cut import Cut, cut_of
from tapas.runtime.draft import Draft
from tapas.runtime.moves import AxisComm, Step
from tapas.runtime.rank import Rank
from tapas.runtime.recompute import Recomputed
from tapas.sharding.layout import Layout


@dataclass
class Left:
    """What a program leaves to its caller."""

    joint: bool = True  # whether the caller can sum over several axes at once
    sums: dict[str, tuple[int, ...]] = field(default_factory=dict)  # parameter -> axes over which to sum its gradient
    scatters: dict[str, Step] = field(default_factory=dict)  # parameter -> its first move, which scatters its gradient
    cuts: dict[str, Cut] = field(default_factory=dict)  # input -> the part of it that the program takes

    def takes(self, step: Step) -> bool:
        """Whether the caller can do all that the first move of a weight does."""
        return step.only_sums_gradients and (self.joint or len(step.back.axes) == 1)

    def note(self, parameter: str, step: Step) -> None:
        if self.takes(step):
            self.sums[parameter] = step.back.axes
        elif step.scatters_gradients:
            self.scatters[parameter] = step


class _Writer:
    def __init__(self, graph: Graph, solution: Solution, rank: Rank, left: Left | None) -> None:
        self.graph, self.solution, self.rank, self.left = graph, solution, rank, left
        self.problem: Problem = solution.problem
        self.draft = Draft()
        self.whole: dict[str, fx.Node] = {}  # leaves
        self.cuts: dict[tuple[str, Layout], fx.Node] = {}
        self.exports: dict[tuple[int, int], fx.Node] = {}  # copy, variable
        self.comms = {a: AxisComm(wire, a, rank.count) for a, wire in enumerate(rank.wires)}
        self.results = self.read_later()
        self.operators = 0  # called so far

    def leaves(self) -> None:
        made = {name for op in self.graph.prelude for name in op.results}
        for leaf in self.graph.leaves:
            if leaf.kind != "constant" or leaf.tensor not in made:
                self.whole[leaf.tensor] = self.draft.placeholder("leaf_" + re.sub(r"\W", "_", leaf.tensor))
        wanted = [leaf.tensor for leaf in self.graph.leaves if leaf.tensor in made]
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
            operands = [values[name] for name in op.operands]
            args = tuple(argument(a, operands) for a in op.args)
            kwargs = {key: argument(value, operands) for key, value in op.kwargs}
            if not op.operands:
                kwargs["device"] = self.rank.device
            node = draft.graph.call_function(resolve(op.target), args, kwargs)
            results = [node] if len(op.results) == 1 else draft.unpacked(node, len(op.results))
            values.update(zip(op.results, results, strict=True))
        node = self.draft.module(draft.finished([values[name] for name in wanted], "Prelude"), *given)
        return dict(zip(wanted, self.draft.unpacked(node, len(wanted)), strict=True))

    def cut(self, name: str, layout: Layout) -> fx.Node:
        """A constant or an input as operators want it; once for all copies."""
        if (name, layout) not in self.cuts:
            made = cut_of(self.problem.folded.tensors[name].shape, layout, self.rank.mesh, self.rank.coord)
            node = self.whole[name]
            self.cuts[name, layout] = self.draft.module(made, node) if made.conversions else node
        return self.cuts[name, layout]

    def read_later(self) -> dict[int, list[int]]:
        """For each block the variables that later copies, or the outputs, read."""
        folded, blocks = self.problem.folded, self.problem.blocks
        found: dict[int, set[int]] = defaultdict(set)
        for c, e in (port for copy in folded.copies for port in copy.ports):
            found[folded.copies[c].block].add(blocks[folded.copies[c].block].exports[e])
        for c, e in folded.outputs:
            found[folded.copies[c].block].add(blocks[folded.copies[c].block].outputs[e])
        return {block: sorted(variables) for block, variables in found.items()}

    def block(self, group: Group) -> WrittenBlock:
        left_out = self.left.takes if self.left is not None else lambda step: False
        results, mode = self.results.get(group.block, []), self.solution.mode(group)
        made = write_block(self.solution.part(group), group.choices, results, self.rank, self.comms, left_out)
        return made if mode == KEEP else replace(made, module=Recomputed(made.module, mode, made.products))

    def copy(self, number: int, copy: Copy, block: WrittenBlock) -> None:
        """One call of a block."""
        given = []
        for what in block.arguments:
            match what:
                case Port():
                    c, e = copy.ports[what.number]
                    variable = self.problem.blocks[self.problem.folded.copies[c].block].exports[e]
                    given.append(self.exports[c, variable])
                case Weight():
                    given.append(self.whole[copy.weights[what.number]])
                case Constant():
                    given.append(self.cut(copy.constants[what.number], what.layout))
        node = self.draft.module(block.module, *given)
        node.meta["first"] = self.operators
        self.operators += len(self.problem.folded.blocks[copy.block].ops)
        results = self.results.get(copy.block, [])
        for variable, result in zip(results, self.draft.unpacked(node, len(results)), strict=True):
            self.exports[number, variable] = result
        if self.left is not None:
            for weight, step in block.first.items():
                self.left.note(copy.weights[weight], step)

    def write(self) -> fx.GraphModule:
        self.leaves()
        folded = self.problem.folded
        written: dict[int, WrittenBlock] = {}
        for group in self.solution.groups():
            written |= dict.fromkeys(group.copies, self.block(group))
        for number, copy in enumerate(folded.copies):
            self.copy(number, copy, written[number])
        outputs = []
        for c, e in folded.outputs:
            outputs.append(self.exports[c, self.problem.blocks[folded.copies[c].block].outputs[e]])
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


def write_program(graph: Graph, solution: Solution, rank: Rank, left: Left | None = None) -> fx.GraphModule:
    """A module that takes the leaves (in the graph's order) and returns the local parts of the outputs.

    With `left` it leaves some work to the caller, which is noted there; without, it does all of it.
    """
    return _Writer(graph, solution, rank, left).write()
