"""The same random numbers for the original and for every rank.

Whoever draws starts from the same seed, whatever was drawn before: then the order of two programs does not matter, nor
what only one of them draws. A rank draws for the whole tensor and takes its part of that.
"""

import operator
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from tapas._torch import TorchDispatchMode
from tapas.ir.graph import Op
from tapas.ir.interpreter import call
from tapas.plan.assignment import OperatorDecision
from tapas.rules.base import Call, rule_for
from tapas.runtime.calls import DrawnCall, Recomputed
from tapas.runtime.collectives import Rank
from tapas.runtime.draws import Draws
from tapas.runtime.parts import shard
from tapas.sharding.layout import Layout
from tapas.verify.trial import Trial

SEED = 20
_generator = threading.RLock()  # ranks that are threads share torch's


class SameDraws(TorchDispatchMode):
    """While active, every random operator starts from the same seed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        with _generator, Draws().apart():
            torch.default_generator.manual_seed(SEED)
            return func(*args, **kwargs)


class WholeDraw(nn.Module):
    """A random operator on one rank: drawn for the whole, of which this is the rank's part."""

    def __init__(self, op: Op, trial: Trial, decided: OperatorDecision, rank: Rank) -> None:
        super().__init__()
        self.op, self.rank, self.results = op, rank, decided.results
        self.shapes = [trial.graph.tensors[name].shape for name in op.operands]
        self.operands = decided.operands

    def forward(self, *parts: torch.Tensor) -> Any:
        whole = [self.padded(*given) for given in zip(parts, self.shapes, self.operands, strict=True)]
        with SameDraws():
            made = call(self.op, dict(zip(self.op.operands, whole, strict=True)))
        results = [
            shard(x, layout, self.rank.mesh, self.rank.coord) for x, layout in zip(made, self.results, strict=True)
        ]
        return results[0] if len(results) == 1 else results

    def padded(self, part: torch.Tensor, shape: tuple[int, ...], layout: Layout) -> torch.Tensor:
        """A tensor of the whole shape that has this rank's part in its place: what is drawn depends on the place only.
        The rest is ones, which every distribution takes."""
        places = shard(torch.arange(torch.Size(shape).numel()).view(shape), layout, self.rank.mesh, self.rank.coord)
        whole = torch.ones(shape, dtype=part.dtype).view(-1)
        return whole.index_put((places.reshape(-1),), part.reshape(-1)).view(shape)


def with_same_draws(program: fx.GraphModule, trial: Trial, rank: Rank) -> fx.GraphModule:
    """The program, in which random operators draw as the original does."""
    tensors = trial.graph.tensors
    random = {number: op for number, op in enumerate(trial.graph.ops) if rule_for(Call.of(op, tensors)).random}
    if random:
        for module in program.modules():  # none of them starts a stream of its own
            if isinstance(module, DrawnCall):
                module.shard = None
            elif isinstance(module, Recomputed):
                module.streams = ()
        for copy, first, block in _blocks(program):
            _replace(block, first, random, trial, trial.assignment.decision(copy).operators, rank)
    return program


def _blocks(program: fx.GraphModule) -> Iterator[tuple[int, int, fx.GraphModule]]:
    """For each call of a block: the number of the copy, that of its first operator, and what is called."""
    calls = [node for node in program.graph.nodes if "first" in node.meta]
    for copy, node in enumerate(calls):
        yield copy, node.meta["first"], written_block(program, node)


def written_block(program: nn.Module, node: fx.Node) -> fx.GraphModule:
    """The block that is called, also where it is computed again, or its weights come from elsewhere."""
    block = program.get_submodule(str(node.target))
    while not isinstance(block, fx.GraphModule):
        block = block.get_submodule("block")
    return block


def _replace(
    block: fx.GraphModule, first: int, random: dict[int, Op], trial: Trial, decided: Sequence[OperatorDecision],
    rank: Rank,
) -> None:  # fmt: skip
    changed = False
    for node in list(block.graph.nodes):
        made = node.meta.get("made")
        if made is None or made.result or first + made.operator not in random:
            continue
        node = caller(node)
        name = f"draw_{made.operator}"
        if str(node.target) == name:  # by an earlier call of the same block
            continue
        given: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), given.append)
        block.add_submodule(name, WholeDraw(random[first + made.operator], trial, decided[made.operator], rank))
        node.op, node.target, node.args, node.kwargs = "call_module", name, tuple(given), {}
        changed = True
    if changed:
        block.recompile()


def caller(node: fx.Node) -> fx.Node:
    """The call that a result comes from: it may have been picked from several, or detached."""
    while node.op == "call_method" or node.target is operator.getitem:
        (node,) = node.all_input_nodes
    return node
