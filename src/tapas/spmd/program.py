"""The program that one rank runs: the captured operators on local shapes, with moves where the plan has them."""

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx, nn

from tapas.capture.replay import argument, resolve
from tapas.fold import Copy
from tapas.graph import Graph, Op
from tapas.layout import Layout, R
from tapas.problem import BlockProblem, OpVariable, Problem, TensorVariable, WeightVariable
from tapas.rules.base import Local, Rule
from tapas.rules.choices import Choice
from tapas.solution import Solution
from tapas.spmd import kernels
from tapas.spmd.convert import Conversion, convert
from tapas.spmd.moves import AxisComm, Step, steps
from tapas.spmd.wire import Axis, Count


@dataclass(frozen=True)
class Rank:
    """Where a program runs."""

    mesh: tuple[int, ...]
    coord: tuple[int, ...]
    wires: Sequence[Axis]
    count: Count
    device: torch.device


@dataclass(frozen=True)
class Made:
    """What a node of the program stands for."""

    operator: int  # position in the graph's operators
    result: int
    layout: Layout


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


@dataclass
class Left:
    """What a program leaves to its caller."""

    joint: bool = True  # whether the caller can sum over several axes at once
    sums: dict[str, tuple[int, ...]] = field(default_factory=dict)  # parameter -> axes over which to sum its gradient
    scatters: dict[str, Step] = field(default_factory=dict)  # parameter -> its first move, which scatters its gradient
    cuts: dict[str, "Cut"] = field(default_factory=dict)  # input -> the part of it that the program takes


class Cut(nn.Module):
    """What a rank reads of a tensor that everyone has whole."""

    def __init__(self, conversions: Sequence[Conversion], layout: Layout) -> None:
        super().__init__()
        self.conversions, self.layout = tuple(conversions), layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conversion in self.conversions:
            x = conversion(x, (), "forward", None)
        return x


# what autocast keeps in full precision: it knows the operators, but not our implementations of them
FULL_PRECISION = {"cross_entropy", "mean_loss", "nll_loss", "softmax", "log_softmax", "layer_norm", "group_norm"}


class KernelCall(nn.Module):
    """A sharded implementation with its own small collectives."""

    def __init__(self, name: str, local: Local, comms: Mapping[int, Any]) -> None:
        super().__init__()
        self.function, self.local, self.comms = getattr(kernels, name), local, comms
        self.dtypes = [dtype_of(t.dtype) for t in local.call.operands] if name in FULL_PRECISION else []

    def forward(self, *operands: torch.Tensor) -> Any:
        if self.dtypes and torch.is_autocast_enabled(operands[0].device.type):
            operands = tuple(x.to(dtype) for x, dtype in zip(operands, self.dtypes, strict=True))
        return self.function(self.local, self.comms, *operands)


class Nothing(nn.Module):
    """A rank that got nothing of an operator does not call it: not every one takes empty shards."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.shapes, self.dtypes = tuple(shapes), tuple(dtypes)

    def forward(self, *operands: torch.Tensor) -> Any:
        made = [operands[0].new_zeros(s, dtype=d) for s, d in zip(self.shapes, self.dtypes, strict=True)]
        # stays in the graph, so that gradients of the operands exist on every rank
        floating = [o for o in operands if o.requires_grad]
        made = [m + 0 * sum(o.sum() for o in floating) if floating and m.is_floating_point() else m for m in made]
        return made[0] if len(made) == 1 else made


class RandomCall(nn.Module):
    """Draws the same numbers on ranks that hold the same shard, others on others."""

    def __init__(self, function: Callable[..., Any], shard: int) -> None:
        super().__init__()
        self.function, self.shard = function, shard

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        seed = int(torch.randint(2**31, ()))  # the generators of all ranks are in step
        with torch.random.fork_rng():
            torch.manual_seed(seed + self.shard)
            return self.function(*args, **kwargs)


class _Writer:
    def __init__(self, graph: Graph, solution: Solution, rank: Rank, left: Left | None) -> None:
        self.graph, self.solution, self.rank, self.left = graph, solution, rank, left
        self.problem: Problem = solution.problem
        self.root = nn.Module()
        self.fx = fx.Graph()
        self.whole: dict[str, fx.Node] = {}  # leaves, and what the prelude makes
        self.cuts: dict[tuple[str, Layout], fx.Node] = {}
        self.exports: dict[tuple[int, int], fx.Node] = {}  # copy, variable
        self.comms = {a: AxisComm(wire, a, rank.count) for a, wire in enumerate(rank.wires)}
        self.modules = 0
        self.operators = 0  # written so far: copies follow the graph's order

    def module(self, made: nn.Module, *args: Any, **kwargs: Any) -> fx.Node:
        name = f"{type(made).__name__.lower()}_{self.modules}"
        self.modules += 1
        self.root.add_module(name, made)
        return self.fx.call_module(name, args, kwargs)

    def prelude(self) -> None:
        for op in self.graph.prelude:
            values = [self.whole[name] for name in op.operands]
            args = tuple(argument(a, values) for a in op.args)
            kwargs = {key: argument(value, values) for key, value in op.kwargs}
            if not op.operands:
                kwargs["device"] = self.rank.device
            node = self.fx.call_function(resolve(op.target), args, kwargs)
            self.whole.update(zip(op.results, self.unpacked(node, len(op.results)), strict=True))

    def unpacked(self, node: fx.Node, count: int) -> list[fx.Node]:
        return [node] if count == 1 else [self.fx.call_function(operator.getitem, (node, i)) for i in range(count)]

    def cut(self, name: str, layout: Layout) -> fx.Node:
        """A constant or an input as an operator wants it."""
        if (name, layout) not in self.cuts:
            shape = self.problem.folded.tensors[name].shape
            now, conversions = [R] * len(layout), []
            for axis, state in enumerate(layout):
                if state.value.kind != "R":
                    old = now[axis]
                    conversions.append(
                        convert(shape, tuple(now), (axis,), old, state.value, self.rank.mesh, self.rank.coord)
                    )
                    now[axis] = state
            node = self.whole[name]
            self.cuts[name, layout] = self.module(Cut(conversions, layout), node) if conversions else node
        return self.cuts[name, layout]

    def moved(self, node: fx.Node, edge: Any, source: int, target: int, weight: str | None = None) -> fx.Node:
        """`weight`: the name of the parameter that is moved, if nobody else reads it."""
        if source == target:
            return node
        before = edge.space.layout(source)
        moves = edge.space.route(source, target)
        rank = self.rank
        found = steps(edge.space.shape, before, moves, rank.mesh, rank.coord, rank.wires, rank.count)
        if weight is not None and self.left is not None:
            if found[0].only_sums_gradients and (self.left.joint or len(found[0].back.axes) == 1):
                self.left.sums[weight] = found.pop(0).back.axes
            elif found[0].scatters_gradients:
                self.left.scatters[weight] = found[0]
        for step in found:
            node = self.module(step, node)
        return node

    def copy(self, number: int, copy: Copy) -> None:
        part: BlockProblem = self.problem.blocks[copy.block]
        own = self.solution.answer.choices[number]
        values: list[list[fx.Node]] = []
        into: dict[tuple[int, int], Any] = {(e.target, e.operand): e for e in part.edges}
        constants = dict(zip(part.block.constants, copy.constants, strict=True))
        stored = [v for v, variable in enumerate(part.variables) if isinstance(variable, WeightVariable)]
        weights = dict(zip(stored, copy.weights, strict=True))
        readers = Counter(e.source for e in part.edges)
        sole = {v: name for v, name in weights.items() if readers[v] == 1}

        def source_of(edge: Any) -> tuple[fx.Node, int]:
            """The node at an edge's source, and the layout it is in."""
            if edge.source >= len(part.variables):
                c, e = copy.ports[edge.source - len(part.variables)]
                variable = self.problem.blocks[self.problem.folded.copies[c].block].exports[e]
                choice = self.solution.answer.choices[c][variable]
                return self.exports[c, variable], int(edge.source_layouts[choice])
            variable = part.variables[edge.source]
            results = values[edge.source]
            position = variable.op.results.index(edge.tensor) if isinstance(variable, OpVariable) else 0
            return results[position], int(edge.source_layouts[own[edge.source]])

        for v, (variable, choice) in enumerate(zip(part.variables, own, strict=True)):
            match variable:
                case WeightVariable():
                    values.append([self.whole[weights[v]]])
                case TensorVariable():
                    edge = into[v, -1]
                    node, layout = source_of(edge)
                    target = int(edge.target_layouts[choice])
                    values.append([self.moved(node, edge, layout, target, sole.get(edge.source))])
                    self.exports[number, v] = values[-1][0]
                case OpVariable():
                    made = variable.table.choice(choice)
                    operands = []
                    for position, name in enumerate(variable.op.operands):
                        edge = into.get((v, position))
                        if edge is None:
                            operands.append(self.cut(constants[name], made.operand(position)))
                        else:
                            node, layout = source_of(edge)
                            target = int(edge.target_layouts[choice])
                            operands.append(self.moved(node, edge, layout, target, sole.get(edge.source)))
                    values.append(self.operator(variable, made, operands))

    def operator(self, variable: OpVariable, choice: Choice, operands: list[fx.Node]) -> list[fx.Node]:
        op, call, rule = variable.op, variable.call, variable.rule
        local = Local(
            call, self.rank.mesh, self.rank.coord, choice.names,
            tuple(choice.operand(i) for i in range(len(call.operands))),
            tuple(choice.result(i) for i in range(len(call.results))),
        )  # fmt: skip
        count = len(op.results)
        kernel = rule.kernel if any(o.factor and o.factor.kernel for o in choice.options) else None
        shapes = [local.result_shape(i) for i in range(count)]
        if kernel is not None:
            node = self.module(KernelCall(kernel, local, self.comms), *operands)
        elif operands and all(prod(s) == 0 for s in shapes):
            node = self.module(Nothing(shapes, [dtype_of(t.dtype) for t in call.results]), *operands)
        else:
            node = self.plain(op, rule, local, operands)
        results = self.unpacked(node, count)
        if any(t.differentiable for t in call.operands):
            results = [
                r
                if t.differentiable or not dtype_of(t.dtype).is_floating_point
                else self.fx.call_method("detach", (r,))
                for r, t in zip(results, call.results, strict=True)
            ]
        for i, result in enumerate(results):  # so that a check can tell which operator went wrong
            result.meta["made"] = Made(self.operators, i, choice.result(i))
        self.operators += 1
        return results

    def plain(self, op: Op, rule: Rule, local: Local, operands: list[fx.Node]) -> fx.Node:
        args, kwargs = rule.local(local) if rule.local else (op.args, op.kwargs)
        function = resolve(rule.target or op.target)
        given = tuple(argument(a, operands) for a in args)
        named = {key: argument(value, operands) for key, value in kwargs}
        if not op.operands:
            named["device"] = self.rank.device
        if rule.random:
            return self.module(RandomCall(function, self.shard_number(local)), *given, **named)
        return self.fx.call_function(function, given, named)

    def shard_number(self, local: Local) -> int:
        number = 0
        for n, i, state in zip(local.mesh, local.coord, local.results[0], strict=True):
            number = number * n + (i if state.sharded else 0)
        return number

    def write(self) -> fx.GraphModule:
        for leaf in self.graph.leaves:
            if leaf.kind != "constant" or not self.made_by_prelude(leaf.tensor):
                self.whole[leaf.tensor] = self.fx.placeholder("leaf_" + leaf.tensor.replace(".", "_").replace("/", "_"))
        self.prelude()
        for number, copy in enumerate(self.problem.folded.copies):
            self.copy(number, copy)
        folded = self.problem.folded
        outputs = []
        for c, e in folded.outputs:
            outputs.append(self.exports[c, self.problem.blocks[folded.copies[c].block].outputs[e]])
        self.fx.output(tuple(outputs))
        if self.left is not None:
            self.leave_cuts(self.left)
        self.fx.lint()
        return fx.GraphModule(self.root, self.fx)

    def leave_cuts(self, left: Left) -> None:
        """An input of which all operators read the same part need not come whole."""
        for leaf in self.graph.leaves:
            node = self.whole[leaf.tensor]
            if leaf.kind == "input" and len(node.users) == 1:
                (cut,) = node.users
                module = self.root.get_submodule(str(cut.target)) if cut.op == "call_module" else None
                if isinstance(module, Cut):
                    cut.replace_all_uses_with(node)
                    self.fx.erase_node(cut)
                    left.cuts[leaf.tensor] = module

    def made_by_prelude(self, name: str) -> bool:
        return any(name in op.results for op in self.graph.prelude)


def write_program(graph: Graph, solution: Solution, rank: Rank, left: Left | None = None) -> fx.GraphModule:
    """A module that takes the leaves (in the graph's order) and returns the local parts of the outputs.

    With `left` it leaves some work to the caller, which is noted there; without, it does all of it.
    """
    return _Writer(graph, solution, rank, left).write()
