"""A folded graph becomes a problem: variables and edges, block by block."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tapas.cost.collectives import ClusterRouter
from tapas.cost.memory import ADAM, Optimizer
from tapas.cost.operators import OpTable, op_table, update_seconds
from tapas.ir.fold import Folded
from tapas.ir.graph import Leaving, Op, Tensor
from tapas.problem.dominance import undominated
from tapas.problem.graph_rules import GraphRules
from tapas.problem.problem import (
    BlockProblem,
    Edge,
    ModeVariable,
    OpVariable,
    Problem,
    TensorVariable,
    Variable,
    WeightVariable,
)
from tapas.rules.base import MODES, Call
from tapas.rules.choices import Option
from tapas.sharding.layout import B, R, S, State, as_values
from tapas.sharding.routing import WHOLE, LayoutSpace

Options = Sequence[Option]
Wanted = Callable[[Call, Options], Options]  # those of an operator's options that are looked at


def _all_of_them(call: Call, available: Options) -> Options:
    return available


class _Seen(NamedTuple):
    """A tensor as one of its readers sees it."""

    space: LayoutSpace
    numbers: np.ndarray  # of its own layouts there


class _BlockBuilder:
    """The variables and edges of one block, as they are put together."""

    def __init__(self, builder: "_ProblemBuilder", number: int) -> None:
        self.builder, self.number = builder, number
        self.block = builder.folded.blocks[number]
        self.readers = Counter(name for op in self.block.ops for name in op.operands)
        self.variables: list[Variable] = []
        self.edges: list[Edge] = []
        self.source: dict[str, tuple[int, np.ndarray]] = {}  # tensor -> variable, its layout under each choice
        self.exports: dict[str, int] = {}
        self.outputs: dict[int, int] = {}
        self.weightlike = set(self.block.weights)  # weights and views of them: their gradients can be sent early
        self.ports = {name: builder.space(name) for name in self.block.ports}
        self.pending: list[tuple[str, int, int, _Seen]] = []  # port, operator that reads it, operand
        self.mode: int | None = None

    def publish(self, name: str, variable: int, layouts: np.ndarray) -> None:
        """Make a tensor readable, through a variable of its own if it has several readers."""
        if name in self.block.exports or self.readers[name] > 1:
            space = self.builder.space(name)
            everything = np.arange(len(space))
            self.variables.append(TensorVariable(self.builder.folded.tensors[name], space, everything))
            self.edges.append(Edge(name, space, variable, len(self.variables) - 1, layouts, everything, -1))
            self.exports[name] = variable = len(self.variables) - 1
            layouts = everything
        self.source[name] = variable, layouts

    def add_weight(self, name: str) -> None:
        variable = self.builder.weight(name)
        self.variables.append(variable)
        self.publish(name, len(self.variables) - 1, variable.stored)

    def add_operator(self, op: Op, number: int) -> None:
        builder = self.builder
        _, call, rule = builder.calls.all[number]
        seen = [builder.seen(name, t) for name, t in zip(op.operands, call.operands, strict=True)]
        made = builder.table(number, [*(view.space for view in seen), *map(builder.space, op.results)])
        incoming = {
            position: self.edge(op, made, position, seen[position])
            for position, name in enumerate(op.operands)
            if name in self.source
        }
        kept = np.arange(len(made))
        if (rule.flops or rule.kernel) and not builder.few:  # elsewhere nothing is dear enough to be replaced
            kept = self.worth_keeping(op, made, incoming, seen)
        self.variables.append(OpVariable(op, call, rule, made, kept, builder.calls.saves[number]))
        here = len(self.variables) - 1
        self.edges += incoming.values()
        self.pending += [
            (name, here, position, seen[position]) for position, name in enumerate(op.operands) if name in self.ports
        ]
        if rule.view and self.weightlike.issuperset(op.operands):
            self.weightlike.update(op.results)
        for position, name in enumerate(op.results):
            self.publish(name, here, made.results[position])

    def edge(self, op: Op, made: OpTable, position: int, seen: "_Seen") -> Edge:
        """From where a tensor is to the operator that comes next."""
        name, here = op.operands[position], len(self.variables)
        variable, layouts = self.source[name]
        share = self.share(op, name)
        early = name in self.weightlike and seen.space.priced
        ahead = isinstance(self.variables[variable], WeightVariable)
        return Edge(
            name, seen.space, variable, here, seen.numbers[layouts], made.operands[position], position,
            made.backward_seconds * share if early else None, made.forward_seconds * share if ahead else None,
            self.builder.router.cluster.overlap,
        )  # fmt: skip

    def share(self, op: Op, name: str) -> float:
        """An operator's passes hide what is sent of all its weights together: by their size."""
        sizes = [self.builder.folded.tensors[n].nbytes for n in op.operands if n in self.weightlike]
        return self.builder.folded.tensors[name].nbytes / max(sum(sizes), 1)

    def worth_keeping(self, op: Op, made: OpTable, incoming: Mapping[int, Edge], seen: Sequence["_Seen"]) -> np.ndarray:
        operands: list[LayoutSpace | np.ndarray | None] = []
        for position, name in enumerate(op.operands):
            if name in self.weightlike:
                operands.append(incoming[position].costs())
            else:
                operands.append(seen[position].space if position in incoming or name in self.ports else None)
        return undominated(made, operands, [self.builder.space(name) for name in op.results])

    def add_outputs(self) -> None:
        for e, name in enumerate(self.block.exports):
            wanted = self.builder.calls.leaving.get((self.number, e))
            if wanted is not None:
                leaving, seen = self.builder.output(name, wanted)
                self.variables.append(leaving)
                self.outputs[e] = here = len(self.variables) - 1
                self.edges.append(Edge(name, seen.space, self.exports[name], here, seen.numbers, leaving.allowed, -1))

    def add_ports(self) -> None:
        """Last: ports are numbered after the own variables."""
        for name, here, position, seen in self.pending:
            target = self.variables[here]
            assert isinstance(target, OpVariable)
            port, layouts = len(self.variables) + self.block.ports.index(name), target.table.operands[position]
            self.edges.append(Edge(name, seen.space, port, here, seen.numbers, layouts, position))

    def add_mode(self) -> None:
        """A module that is trained may compute its activations again."""
        trained = any(t.priced for v in self.variables if isinstance(v, OpVariable) for t in v.call.operands)
        if trained and self.builder.calls.modules[self.number]:
            self.mode = len(self.variables)
            self.variables.append(ModeVariable(MODES))

    def finished(self) -> BlockProblem:
        exports = tuple(self.exports[name] for name in self.block.exports)
        return BlockProblem(
            self.block, tuple(self.variables), tuple(self.edges), exports, self.outputs, tuple(self.ports.values()),
            self.mode, self.builder.calls.sharing[self.number], self.builder.calls.saved[self.number],
            self.builder.calls.kept_ports[self.number],
        )  # fmt: skip


class _ProblemBuilder:
    def __init__(self, calls: GraphRules, router: ClusterRouter, optimizer: Optimizer, wanted: Wanted) -> None:
        self.calls, self.folded, self.kinds = calls, calls.folded, calls.kinds
        self.router, self.mesh, self.optimizer = router, router.mesh.sizes, optimizer
        self.few = wanted is not _all_of_them
        self.spaces: dict[str, LayoutSpace] = {}
        self.tables: dict[tuple, OpTable] = {}
        self.shares = self.message_shares()
        self.leaving = {self.kinds.find(self.folded.blocks[b].exports[e]) for b, e in calls.leaving}
        self.options = self.wanted_options(wanted)
        self.states = self.wanted_states()

    def message_shares(self) -> dict[str, float]:
        """Of each weight in the message in which those of its block travel: it bears as much of what a message takes
        whatever its size."""
        found: dict[str, float] = {}
        for block in self.folded.blocks:
            sizes = {name: self.folded.tensors[name].nbytes for name in block.weights}
            found |= {name: nbytes / max(sum(sizes.values()), 1) for name, nbytes in sizes.items() if nbytes}
        return found

    def wanted_options(self, wanted: Wanted) -> list[Options]:
        known: dict[int, Options] = {}
        found = []
        for (_, call, _), available in zip(self.calls.all, self.calls.options(self.mesh), strict=True):
            if id(available) not in known:
                known[id(available)] = wanted(call, available)
            found.append(known[id(available)])
        return found

    def table(self, number: int, spaces: Sequence[LayoutSpace]) -> OpTable:
        """The choices of a call; those of calls that are equal are worked out once."""
        available, saved, sole = self.options[number], self.calls.kept[number], self.calls.sole[number]
        fused = self.calls.fused[number]
        key = self.calls.equal[number], id(available), tuple(map(id, spaces)), saved, sole, fused
        if key not in self.tables:
            _, call, rule = self.calls.all[number]
            self.tables[key] = op_table(
                call, rule, self.calls.choices(number, available), spaces, saved, sole, self.router.links, fused
            )
        return self.tables[key]

    def wanted_states(self) -> dict[str, set[State]]:
        """The states of each kind of tensor that an operator around it can make use of."""
        found: dict[str, set[State]] = defaultdict(set)
        for (op, _, _), available in zip(self.calls.all, self.options, strict=True):
            for option in available:
                for name, state in zip((*op.operands, *op.results), (*option.operands, *option.results), strict=True):
                    found[name].add(state)
        for block in self.folded.blocks:
            for name in block.weights:
                shape = self.folded.tensors[name].shape
                found[self.kinds.find(name)] |= {S(d) for d, size in enumerate(shape) if size > 1}
        return found

    def space(self, name: str) -> LayoutSpace:
        if name not in self.spaces:
            tensor, kind = self.folded.tensors[name], self.kinds.find(name)
            leaf, states = self.folded.leaf_of.get(name), self.states[kind]
            packed = self.shares.get(name, 1.0) if leaf is not None and leaf.kind == "parameter" else 0.0
            besides = WHOLE
            if self.few and not (packed or kind in self.leaving or min(self.mesh) == 1):
                # what is split in one way only goes nowhere else; and one way of being whole is enough on the way
                besides = () if len(states) == 1 else (B,)
            self.spaces[name] = self.router.space(tensor, states, packed, besides)
        return self.spaces[name]

    def block(self, number: int) -> BlockProblem:
        part = _BlockBuilder(self, number)
        for name in part.block.weights:
            part.add_weight(name)
        for i, op in enumerate(part.block.ops, self.calls.first[number]):
            part.add_operator(op, i)
        part.add_outputs()
        part.add_mode()
        part.add_ports()
        return part.finished()

    def seen(self, name: str, tensor: Tensor) -> _Seen:
        """The layouts of a tensor as a reader sees it who sends no gradient back, or one that nobody pays for."""
        own, space = self.folded.tensors[name], self.space(name)
        if (own.differentiable, own.priced) == (tensor.differentiable, tensor.priced):
            return _Seen(space, np.arange(len(space)))
        if tensor.differentiable:
            return _Seen(self.router.space(tensor, space.states, space.packed, ()), np.arange(len(space)))
        values = self.router.space(tensor, {s.value for s in space.states}, space.packed)
        return _Seen(values, np.array([values.find(as_values(space.layout(i))) for i in range(len(space))]))

    def output(self, name: str, wanted: Leaving) -> tuple[TensorVariable, _Seen]:
        """The layouts in which an output may leave, and how its own layouts look from there. Whoever gets it sends a
        gradient back as it is split, or none."""
        tensor = self.folded.tensors[name]
        if not wanted.gradient:
            tensor = tensor.constant
        elif not wanted.priced:
            tensor = tensor._replace(unpriced=True)
        seen = self.seen(name, tensor)
        kinds = np.array([s.kind for s in seen.space.states])[seen.space.combos]
        allowed = np.flatnonzero(((kinds == "R") | (not wanted.whole) & (kinds == "S")).all(1))
        return TensorVariable(tensor, seen.space, allowed), seen

    def weight(self, name: str) -> WeightVariable:
        tensor, space = self.folded.tensors[name], self.space(name)
        storable = np.array([self.storable(state) for state in space.states])
        tiled = np.array([bool(state.tiling) for state in space.states])
        # DTensor cannot put a packed dim together again that two axes split
        stored = np.flatnonzero(storable[space.combos].all(1) & (tiled[space.combos].sum(1) <= 1))
        seconds = update_seconds(space, self.router.cluster, self.optimizer)[stored]
        return WeightVariable(tensor, space, stored, seconds if tensor.priced else np.zeros(len(stored)))

    def storable(self, state: State) -> bool:
        """Parameters are DTensors: whole, split plainly, or split evenly in equal segments."""
        if state == R:
            return True
        if not state.sharded:
            return False
        if not state.tiling:
            return True
        length, unit = state.tiling[0]
        even = (length // unit) % self.router.mesh.devices == 0
        return len(set(state.tiling)) == 1 and len(state.tiling) > 1 and even

    def build(self) -> Problem:
        blocks = tuple(self.block(b) for b in range(len(self.folded.blocks)))
        missing = tuple(op for op, _, rule in self.calls.all if rule.missing)
        return Problem(self.folded, self.router, blocks, self.calls.roles, missing, self.kinds.find, self.optimizer)


def build_problem(
    folded: Folded | GraphRules, router: ClusterRouter, optimizer: Optimizer = ADAM, wanted: Wanted = _all_of_them
) -> Problem:
    """The whole problem; or, if not all options of all calls are wanted, a smaller one whose plans are plans of the
    whole one, too. The calls of a graph that is posed on many meshes can be made once."""
    calls = folded if isinstance(folded, GraphRules) else GraphRules(folded, router.compiled)
    return _ProblemBuilder(calls, router, optimizer, wanted).build()
