"""A block on local shapes: written once, called by all copies that choose the same and find the same around them.

Moves belong to the copy that reads: a port comes as the copy that made it left it, and is moved in here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx, nn

from tapas.ir.interpreter import argument, resolve
from tapas.problem.problem import BlockProblem, Edge, ModeVariable, OpVariable, TensorVariable, WeightVariable
from tapas.rules.base import Local, Rule
from tapas.rules.options import Choice
from tapas.runtime.calls import KernelCall, Nothing, RandomCall, dtype_of
from tapas.runtime.draft import Draft
from tapas.runtime.moves import AxisComm, Step, steps
from tapas.runtime.rank import Rank
from tapas.runtime.recompute import recomputable
from tapas.sharding.layout import Layout


@dataclass(frozen=True)
class Made:
    """What a node of a block stands for."""

    operator: int  # position in the block's operators
    result: int
    layout: Layout


@dataclass(frozen=True)
class Port:
    number: int  # of the block's ports


@dataclass(frozen=True)
class Weight:
    number: int  # of the block's weights


@dataclass(frozen=True)
class Constant:
    number: int  # of the block's constants
    layout: Layout  # the part of it that is wanted


Argument = Port | Weight | Constant


@dataclass(frozen=True)
class WrittenBlock:
    module: nn.Module
    arguments: tuple[Argument, ...]  # as they are first read
    first: dict[int, Step]  # weight -> the first of its moves
    products: frozenset[str]  # what selective recomputation keeps


class _Writer:
    def __init__(
        self, part: BlockProblem, choices: Sequence[int], rank: Rank, comms: Mapping[int, AxisComm],
        left_out: Callable[[Step], bool],
    ) -> None:  # fmt: skip
        self.part, self.choices, self.rank, self.comms, self.left_out = part, choices, rank, comms, left_out
        self.draft = Draft()
        self.into: dict[tuple[int, int], Edge] = {(e.target, e.operand): e for e in part.edges}
        stored = [v for v, variable in enumerate(part.variables) if isinstance(variable, WeightVariable)]
        self.weights = {v: number for number, v in enumerate(stored)}
        self.values: dict[int, list[fx.Node]] = {}  # what operators and tensor variables hold
        self.arguments: dict[Argument, fx.Node] = {}
        self.first: dict[int, Step] = {}
        self.operators = 0

    def argument(self, what: Argument) -> fx.Node:
        if what not in self.arguments:
            name = f"{type(what).__name__.lower()}_{len(self.arguments)}"
            self.arguments[what] = self.draft.placeholder(name)
        return self.arguments[what]

    def source(self, edge: Edge) -> fx.Node:
        own = self.part.variables
        if edge.source >= len(own):
            return self.argument(Port(edge.source - len(own)))
        match own[edge.source]:
            case WeightVariable():
                return self.argument(Weight(self.weights[edge.source]))
            case TensorVariable():
                return self.values[edge.source][0]
            case OpVariable(op=op):
                return self.values[edge.source][op.results.index(edge.tensor)]
            case ModeVariable():
                raise AssertionError("nothing comes from it")

    def moved(self, edge: Edge) -> fx.Node:
        """A tensor as it arrives at the end of an edge."""
        node, rank = self.source(edge), self.rank
        source = int(edge.source_layouts[self.choices[edge.source]])
        target = int(edge.target_layouts[self.choices[edge.target]])
        if source == target:
            return node
        before, moves = edge.space.layout(source), edge.space.route(source, target)
        found = steps(edge.space.shape, before, moves, rank.mesh, rank.coord, rank.wires, rank.count)
        weight = self.weights.get(edge.source)  # it has one edge: several readers have a tensor variable between
        if weight is not None:
            self.first[weight] = found[0]
            if self.left_out(found[0]):
                found = found[1:]
        for step in found:
            node = self.draft.module(step, node)
        return node

    def operand(self, v: int, variable: OpVariable, choice: Choice, position: int) -> fx.Node:
        edge = self.into.get((v, position))
        if edge is not None:
            return self.moved(edge)
        number = self.part.block.constants.index(variable.op.operands[position])
        return self.argument(Constant(number, tuple(state.value for state in choice.operand(position))))

    def operator(self, variable: OpVariable, choice: Choice, operands: list[fx.Node]) -> list[fx.Node]:
        op, call, rule = variable.op, variable.call, variable.rule
        local = Local(
            call, self.rank.mesh, self.rank.coord, choice.names,
            tuple(choice.operand(i) for i in range(len(call.operands))),
            tuple(choice.result(i) for i in range(len(call.results))),
        )  # fmt: skip
        count = len(op.results)
        sharded = rule.kernel is not None and any(o.factor and o.factor.kernel for o in choice.options)
        shapes = [local.result_shape(i) for i in range(count)]
        if sharded:
            node = self.draft.module(KernelCall(rule, local, self.comms), *operands)
        elif operands and all(prod(s) == 0 for s in shapes):
            node = self.draft.module(Nothing(shapes, [dtype_of(t.dtype) for t in call.results]), *operands)
        else:
            node = self.plain(variable, rule, local, operands)
        results = [node] if count == 1 else self.draft.unpacked(node, count)
        if any(t.differentiable for t in call.operands):
            results = [
                r
                if t.differentiable or not dtype_of(t.dtype).is_floating_point
                else self.draft.graph.call_method("detach", (r,))
                for r, t in zip(results, call.results, strict=True)
            ]
        for i, result in enumerate(results):  # so that a check can tell which operator went wrong
            result.meta["made"] = Made(self.operators, i, choice.result(i))
        self.operators += 1
        return results

    def plain(self, variable: OpVariable, rule: Rule, local: Local, operands: list[fx.Node]) -> fx.Node:
        op = variable.op
        args, kwargs = rule.local(local) if rule.local else (op.args, op.kwargs)
        function = recomputable(resolve(rule.target or op.target), rule)
        given = tuple(argument(a, operands) for a in args)
        named: dict[str, Any] = {key: argument(value, operands) for key, value in kwargs}
        if not op.operands:
            named["device"] = self.rank.device
        if rule.random:
            return self.draft.module(RandomCall(function, _shard_number(local)), *given, **named)
        if isinstance(function, nn.Module):
            return self.draft.module(function, *given, **named)
        return self.draft.graph.call_function(function, given, named)

    def products(self) -> frozenset[str]:
        rules = (variable.rule for variable in self.part.variables if isinstance(variable, OpVariable))
        return frozenset(target for rule in rules for target in rule.products)

    def write(self, results: Sequence[int]) -> WrittenBlock:
        for v, variable in enumerate(self.part.variables):
            match variable:
                case WeightVariable() | ModeVariable():
                    pass
                case TensorVariable():
                    self.values[v] = [self.moved(self.into[v, -1])]
                case OpVariable():
                    made = variable.table.choice(self.choices[v])
                    operands = [self.operand(v, variable, made, i) for i in range(len(variable.op.operands))]
                    self.values[v] = self.operator(variable, made, operands)
        module = self.draft.finished([self.values[v][0] for v in results], "Block")
        return WrittenBlock(module, tuple(self.arguments), self.first, self.products())


def _shard_number(local: Local) -> int:
    number = 0
    for n, i, state in zip(local.mesh, local.coord, local.results[0], strict=True):
        number = number * n + (i if state.sharded else 0)
    return number


def write_block(
    part: BlockProblem, choices: Sequence[int], results: Sequence[int], rank: Rank, comms: Mapping[int, AxisComm],
    left_out: Callable[[Step], bool],
) -> WrittenBlock:  # fmt: skip
    """`choices`: of the own variables, then of the ports. `results`: the tensor variables whose values it
    returns. `left_out`: first moves of weights that are none of the block's business."""
    return _Writer(part, choices, rank, comms, left_out).write(results)
