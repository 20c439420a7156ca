"""A block on local shapes: written once, called by all copies that are decided alike.

Moves belong to the copy that reads: a port comes as the copy that made it left it, and is moved in here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod
from typing import Any

import torch
from torch import fx, nn

from tapas.ir.custom_ops import CACHES, WRITING
from tapas.ir.fold import Block
from tapas.ir.graph import Op, Tensor, Tensors
from tapas.ir.interpreter import arguments, callee, returns_list
from tapas.plan.assignment import BlockDecision, OperatorDecision, OutputDecision, gathered_ahead, saved_weights
from tapas.plan.fingerprint import tensor_references
from tapas.plan.pieces import PiecedMove, pieced_moves
from tapas.rules.base import RECOMPUTED, Call, Local, Rule, rule_for
from tapas.runtime.axis_comm import AxisComm
from tapas.runtime.calls import Draft, KernelCall, Nothing, OtherStream, OwnPrecision, dense_rows, recomputable
from tapas.runtime.collectives import Rank
from tapas.runtime.lost_ranks import Site
from tapas.runtime.moves import Step, steps
from tapas.runtime.pieces import GatheredProduct, ScatteredProduct
from tapas.sharding.layout import Layout, as_values
from tapas.sharding.route import Route


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
    sums: dict[int, Step]  # weight -> its first move, left to the caller: it sums gradients
    gathers: dict[int, tuple[Step, ...]]  # weight -> its next moves, left to the caller: they gather
    saved: frozenset[int]  # weights that operators keep for the backward pass
    products: frozenset[str]  # what selective recomputation keeps
    streams: tuple[int, ...]  # the shards that random operators draw for, in turn


class _BlockWriter:
    def __init__(
        self, block: Block, tensors: Tensors, decision: BlockDecision, rank: Rank, path: str,
        outside: Callable[[Step], bool], written: frozenset[int], pieces: int,
    ) -> None:  # fmt: skip
        self.block, self.tensors, self.decision = block, tensors, decision
        self.written = {block.constants[number] for number in written}
        self.rank, self.path, self.outside = rank, path, outside
        self.site = Site("", path)  # of what is being written
        self.sites: dict[str, Site] = {}  # of what operators made
        self.draft = Draft()
        references = tensor_references(block)
        published = {tensor.tensor: tensor for tensor in decision.tensors}
        self.published = {name: published[ref] for name, ref in references.items() if ref in published}
        self.layouts: dict[str, Layout] = dict(zip(block.weights, decision.weights, strict=True))
        self.layouts |= zip(block.ports, decision.ports, strict=True)
        self.values: dict[str, fx.Node] = {}  # what readers find
        self.arguments: dict[Argument, fx.Node] = {}
        self.sums: dict[int, Step] = {}
        self.gathers: dict[int, tuple[Step, ...]] = {}
        self.rules: list[Rule] = []  # of the operators so far
        self.pieces, self.pieced = pieces, dict[int, PiecedMove]()  # moves that products do, by their numbers
        if pieces > 1:
            self.pieced = pieced_moves(block, tensors, decision, rank.mesh, rank.coord, pieces)
        shared = [move for move in self.pieced.values() if move.gathers and move.reader is None]
        self.waiting = {move.tensor: move for move in shared}  # for the first of their readers
        self.scattered: set[str] = set()  # by the products that made them: the first step of their way is done
        self.streams: list[tuple[tuple[int, ...], int]] = []  # axes that random operators are split over, and the shard

    def argument(self, what: Argument) -> fx.Node:
        if what not in self.arguments:
            name = f"{type(what).__name__.lower()}_{len(self.arguments)}"
            self.arguments[what] = self.draft.placeholder(name)
        return self.arguments[what]

    def value(self, name: str) -> fx.Node:
        """A tensor as its readers find it."""
        if name in self.values:
            return self.values[name]
        if name in self.block.ports:
            return self.argument(Port(self.block.ports.index(name)))
        return self.argument(Weight(self.block.weights.index(name)))

    def moved(self, name: str, route: Route, gradient: bool = True) -> fx.Node:
        """A tensor at the end of a route from where it is found; `gradient`: one may come back."""
        node, layout = self.value(name), self.layouts[name]
        if name in self.scattered:
            self.scattered.remove(name)
            route = route[1:]
        if not gradient and self.tensors[name].differentiable:
            node, layout = self.draft.graph.call_method("detach", (node,)), as_values(layout)
        if not route:
            return node
        source = self.sites.get(name, self.site)
        site = replace(self.site, source=source.module)
        moves = steps(self.tensors[name].shape, layout, route, self.rank, site)
        if name in self.block.weights and name not in self.values:  # it is moved once: several readers find it moved
            moves = self.left_to_do(self.block.weights.index(name), moves)
        for step in moves:
            node = self.draft.module(step, node)
        return node

    def left_to_do(self, weight: int, moves: list[Step]) -> list[Step]:
        """Without the first moves of a weight, as far as they are the caller's: they run beside the computation."""
        if moves[0].only_sums_gradients and self.outside(moves[0]):
            self.sums[weight], moves = moves[0], moves[1:]
        ahead = tuple(takewhile(lambda step: gathered_ahead(step.move) and self.outside(step), moves))
        if all(step.only_sums_gradients for step in ahead):
            return moves
        self.gathers[weight] = ahead
        return moves[len(ahead) :]

    def publish(self, name: str) -> None:
        """Move a tensor to where its readers find it, if there are several; or the first of them moves it the last
        step."""
        decided, waiting = self.published.get(name), self.waiting.get(name)
        if decided is not None and waiting is not None:
            self.values[name], self.layouts[name] = self.moved(name, decided.route[: waiting.number]), waiting.layout
        elif decided is not None:
            self.values[name], self.layouts[name] = self.moved(name, decided.route), decided.layout

    def operand(self, tensor: Tensor, decided: OperatorDecision, position: int) -> fx.Node:
        if tensor.name in self.layouts:
            return self.moved(tensor.name, decided.routes[position], tensor.differentiable)
        number = self.block.constants.index(tensor.name)
        layout = decided.operands[position]
        return self.argument(Constant(number, layout if tensor.differentiable else as_values(layout)))

    def operator(self, op: Op, decided: OperatorDecision) -> None:
        self.site = Site(op.module, self.path)
        self.sites |= dict.fromkeys(op.results, self.site)
        call = Call.of(op, self.tensors)
        number = len(self.rules)
        move = self.pieced.get(number)
        if move is not None and move.reader == number:  # the product itself goes the last step
            route, *others = decided.routes
            decided = replace(decided, routes=(route[: move.number], *others))
        operands = [self.operand(t, decided, i) for i, t in enumerate(call.operands)]
        rule, names = rule_for(call), tuple(text.split("|")[0] for text in decided.choice)
        if rule.dense_rows:
            operands = [self.draft.graph.call_function(dense_rows, (operand,)) for operand in operands]
        self.rules.append(rule)
        local = Local(call, self.rank.mesh, self.rank.coord, names, decided.operands, decided.results)
        made = decided.results
        if move is not None:
            results = [self.product(op, rule, local, operands, move)]
            made = made if move.gathers else (move.hop.after(move.layout),)
        else:
            results = self.call(op, rule, local, operands)
        if any(t.differentiable for t in call.operands):
            results = [
                r
                if t.differentiable or not getattr(torch, t.dtype).is_floating_point
                else self.draft.graph.call_method("detach", (r,))
                for r, t in zip(results, call.results, strict=True)
            ]
        for i, (name, result) in enumerate(zip(op.results, results, strict=True)):
            result.meta["made"] = Made(number, i, made[i])  # so that a check can tell which is wrong
            self.values[name], self.layouts[name] = result, made[i]
            self.publish(name)

    def call(self, op: Op, rule: Rule, local: Local, operands: list[fx.Node]) -> list[fx.Node]:
        kernels = {factor.name for factor in rule.factors if factor.kernel is not None}
        if rule.kernel is not None and not kernels.isdisjoint(local.choice):
            comms = {axis: AxisComm(self.rank, axis, self.site) for axis in range(len(self.rank.wires))}
            kernel = self.drawing(KernelCall(rule.kernel, local, comms, rule.full_precision), rule, local)
            if op.own_precision:
                kernel = OwnPrecision(kernel, self.rank.device)
            node = self.draft.call(kernel, tuple(operands), {})
        elif operands and all(prod(local.result_shape(i)) == 0 for i in range(len(op.results))):
            node = self.draft.call(self.drawing(Nothing(local), rule, local), tuple(operands), {})
        else:
            node = self.plain(op, rule, local, operands)
            if len(op.results) == 1 and returns_list(rule.target or op.target):
                return self.draft.unpacked(node, 1)
        return [node] if len(op.results) == 1 else self.draft.unpacked(node, len(op.results))

    def product(self, op: Op, rule: Rule, local: Local, operands: list[fx.Node], move: PiecedMove) -> fx.Node:
        """One that is computed in pieces, and does a move."""
        shape, source = self.tensors[move.tensor].shape, self.sites.get(move.tensor, self.site)
        step = Step(shape, move.layout, move.hop, self.rank, replace(self.site, source=source.module))
        lengths = move.lengths(shape, self.rank.mesh, self.rank.coord, self.pieces)
        kind = GatheredProduct if move.gathers else ScatteredProduct
        node = self.plain(op, rule, local, operands, lambda function: kind(function, step, lengths))
        if not move.gathers:
            self.scattered.add(move.tensor)
            return node
        made, whole = self.draft.unpacked(node, 2)
        if move.reader is None:  # others find it here
            del self.waiting[move.tensor]
            self.values[move.tensor], self.layouts[move.tensor] = whole, move.hop.after(move.layout)
        return made

    def plain(
        self, op: Op, rule: Rule, local: Local, operands: list[fx.Node],
        within: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    ) -> fx.Node:  # fmt: skip
        """`within`: what calls the operator."""
        args, kwargs = rule.local(local) if rule.local else (op.args, op.kwargs)
        function = recomputable(self.callee(op, rule.target or op.target), rule)
        given, named = arguments(args, kwargs, operands)
        if not op.operands:
            named["device"] = self.rank.device
        function = self.drawing(function, rule, local)
        if op.own_precision:
            function = OwnPrecision(function, self.rank.device)
        return self.draft.call(within(function), given, named)

    def callee(self, op: Op, target: str) -> Callable[..., Any]:
        """A cache is written to; a norm writes to its running statistics, unless another one reads them or it runs a
        second time."""
        if target in CACHES:
            return CACHES[target]
        statistics = op.operands[-2:]
        if target in WRITING and self.written.issuperset(statistics) and self.decision.recompute not in RECOMPUTED:
            return WRITING[target]
        return callee(target)

    def drawing(self, function: Callable[..., Any], rule: Rule, local: Local) -> Callable[..., Any]:
        """A call, with a stream of its own where it is random and split over other axes than the random one before it.
        Streams are started alike on all ranks, also by those that get nothing."""
        if not rule.random:
            return function
        axes, shard = _shard(local)
        if self.streams and self.streams[-1][0] == axes:
            return function
        self.streams.append((axes, shard))
        return OtherStream(function, shard, self.rank.draws) if len(self.streams) > 1 else function

    def write(self, exports: Sequence[int]) -> WrittenBlock:
        for name in self.block.weights:
            self.site = Site(name.rpartition(".")[0], self.path)
            self.publish(name)
        for op, decided in zip(self.block.ops, self.decision.operators, strict=True):
            self.operator(op, decided)
        exported = [self.value(self.block.exports[export]) for export in exports]
        module = self.draft.finished([*exported, *map(self.left, self.decision.outputs)], "Block")
        products = frozenset(target for rule in self.rules for target in rule.products)
        saved = frozenset(map(self.block.weights.index, saved_weights(self.block, self.tensors)))
        streams = tuple(shard for _, shard in self.streams)
        return WrittenBlock(module, tuple(self.arguments), self.sums, self.gathers, saved, products, streams)

    def left(self, output: OutputDecision) -> fx.Node:
        """A tensor as it leaves the model."""
        name = self.block.exports[output.export]
        self.site = self.sites.get(name, Site("", self.path))
        return self.moved(name, output.route, output.gradient)


def _shard(local: Local) -> tuple[tuple[int, ...], int]:
    """The axes over which a result is split, and the number of this rank's part."""
    axes, number = tuple(axis for axis, state in enumerate(local.results[0]) if state.sharded), 0
    for axis in axes:
        number = number * local.mesh[axis] + local.coord[axis]
    return axes, number


def write_block(
    block: Block, tensors: Tensors, decision: BlockDecision, exports: Sequence[int], rank: Rank,
    path: str, outside: Callable[[Step], bool], written: frozenset[int] = frozenset(), pieces: int = 1,
) -> WrittenBlock:  # fmt: skip
    """`exports`: those that it returns as others find them, before those that leave the model as they do.
    `path`: of the copy whose names the block has. `outside`: whether the caller can do a move of a weight.
    `written`: constants that it may write to. `pieces`: of activations, see plan/pieces.py."""
    return _BlockWriter(block, tensors, decision, rank, path, outside, written, pieces).write(exports)
