"""Folded graph + rules + routing + cost -> number tables for the search, and the way back.

Variables: one per operator (its choice), per weight (how it is stored), and per tensor that several
operators read or that leaves its block (the layout in which all of them find it: a move is paid once
however many readers there are). Edges carry the cheapest route between the layouts at their ends.
Inputs, buffers and constants are no variables: whoever reads them slices what it needs, for free.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tapas.cost import OpTable, op_table, update_seconds
from tapas.dims import DimRoles, Groups
from tapas.dominance import undominated
from tapas.fold import Block, Folded
from tapas.graph import Op, Tensor
from tapas.layout import R, S, State
from tapas.routing import Router, Space
from tapas.rules.base import Call, Rule, rule_for
from tapas.rules.choices import options
from tapas.rules.tiling import find_tilings
from tapas.search import Block as Tables
from tapas.search import Copy as Wiring
from tapas.search import Network, table


@dataclass(frozen=True)
class OpVariable:
    op: Op
    call: Call
    rule: Rule
    table: OpTable
    kept: np.ndarray  # choices that no other one replaces; all that matter as long as nothing is pinned

    @property
    def seconds(self) -> np.ndarray:
        return self.table.seconds


@dataclass(frozen=True)
class WeightVariable:
    tensor: Tensor
    space: Space
    stored: np.ndarray  # the layouts it may be stored in, numbers in its space
    seconds: np.ndarray  # of the optimizer's update


@dataclass(frozen=True)
class TensorVariable:
    tensor: Tensor
    space: Space
    allowed: np.ndarray  # layouts, numbers in its space

    @property
    def seconds(self) -> np.ndarray:
        return np.zeros(len(self.allowed))


Variable = OpVariable | WeightVariable | TensorVariable


@dataclass(frozen=True)
class Edge:
    """A tensor on its way from one variable to another. Numbers from `own` on are ports."""

    tensor: str  # by the name of the block's first copy
    space: Space
    source: int
    target: int
    source_layouts: np.ndarray  # [choice of source] -> layout number
    target_layouts: np.ndarray
    operand: int  # of the target operator; -1 if the target is a tensor variable
    hidden: np.ndarray | None = None  # backward seconds of the target behind which gradients can hide

    def costs(self, source: np.ndarray | None = None, target: np.ndarray | None = None) -> np.ndarray:
        """Seconds for some choices (by default all) of the variables at both ends."""
        before = self.source_layouts if source is None else self.source_layouts[source]
        after = self.target_layouts if target is None else self.target_layouts[target]
        total = self.space.seconds[np.ix_(before, after)]
        if self.hidden is None:
            return total
        hidden = self.hidden if target is None else self.hidden[target]
        forward = self.space.forward_seconds[np.ix_(before, after)]
        return forward + np.maximum(total - forward - hidden[None, :], 0.0)


@dataclass(frozen=True)
class BlockProblem:
    block: Block
    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...]
    exports: tuple[int, ...]  # the tensor variable of each export
    outputs: dict[int, int]  # export that leaves the model -> the variable that says in which layout
    port_sizes: tuple[int, ...]


Rows = Mapping[tuple[int, int], np.ndarray]  # (block, variable) -> the choices left


@dataclass(frozen=True)
class Problem:
    folded: Folded
    router: Router
    blocks: tuple[BlockProblem, ...]
    roles: DimRoles
    missing: tuple[Op, ...]  # operators without a rule
    name_of: Callable[[str], str]  # a tensor's name -> that of the kind of tensor it is one of

    @cached_property
    def unread(self) -> frozenset[str]:
        """Parameters that no operator reads: they are stored whole, and that is all."""
        read = {name for copy in self.folded.copies for name in copy.weights}
        return frozenset(leaf.tensor for leaf in self.folded.leaves if leaf.kind == "parameter") - read

    def rows(self, pinned: Rows | None = None) -> dict[tuple[int, int], np.ndarray]:
        """The choices that matter: those that the pins leave, elsewhere those that nothing replaces."""
        found = {
            (b, v): variable.kept
            for b, part in enumerate(self.blocks)
            for v, variable in enumerate(part.variables)
            if isinstance(variable, OpVariable) and len(variable.kept) < len(variable.table)
        }
        return found | dict(pinned or {})

    def network(self, rows: Rows) -> Network:
        """The tables, restricted to some choices of some variables."""
        blocks = []
        for b, part in enumerate(self.blocks):
            kept = [rows.get((b, v)) for v in range(len(part.variables))]
            ports = [self._port_rows(b, i, rows) for i in range(len(part.port_sizes))]
            blocks.append(_tables(part, kept, ports))
        copies = tuple(
            Wiring(copy.block, tuple((c, self.blocks[self.folded.copies[c].block].exports[e]) for c, e in copy.ports))
            for copy in self.folded.copies
        )
        return Network(tuple(blocks), copies)

    def _port_rows(self, block: int, port: int, rows: Rows) -> np.ndarray | None:
        """A port has the choices of the tensor variable it is bound to (the same for all copies)."""
        found: list[np.ndarray | None] = []
        for copy in self.folded.copies:
            if copy.block == block:
                c, e = copy.ports[port]
                source = self.folded.copies[c].block
                found.append(rows.get((source, self.blocks[source].exports[e])))
        first = found[0]
        same = (f is None if first is None else f is not None and np.array_equal(f, first) for f in found)
        if not all(same):
            raise ValueError("copies of a block read tensors that are pinned differently")
        return first


def _tables(part: BlockProblem, kept: Sequence[np.ndarray | None], ports: Sequence[np.ndarray | None]) -> Tables:
    own = len(part.variables)
    everything = [*kept, *ports]
    sizes, tables = [], []
    for v, variable in enumerate(part.variables):
        costs = variable.seconds if kept[v] is None else variable.seconds[kept[v]]
        sizes.append(len(costs))
        tables.append(table((v,), costs))
    for i, size in enumerate(part.port_sizes):
        chosen = ports[i]
        sizes.append(size if chosen is None else len(chosen))
    for edge in part.edges:
        tables.append(table((edge.source, edge.target), edge.costs(everything[edge.source], everything[edge.target])))
    return Tables(tuple(sizes), own, tuple(tables))


class _Builder:
    def __init__(self, folded: Folded, router: Router) -> None:
        self.folded, self.router, self.mesh = folded, router, router.mesh.sizes
        self.kinds = Groups()  # tensors that stand for the same thing in different copies
        for copy in folded.copies:
            for name, (c, e) in zip(folded.blocks[copy.block].ports, copy.ports, strict=True):
                self.kinds.join(folded.blocks[folded.copies[c].block].exports[e], name)
        self.calls: list[tuple[Op, Call, Rule]] = []
        self.first: list[int] = []  # number of each block's first call
        for block in folded.blocks:
            self.first.append(len(self.calls))
            for op in block.ops:
                call = self.call(op)
                self.calls.append((self.renamed(op), call, rule_for(call)))
        weights = {leaf.tensor for leaf in folded.leaves if leaf.kind == "parameter"}
        tilings, _ = find_tilings(self.calls, self.mesh, weights)
        self.options = [
            options(rule, call, tiling, self.mesh) for (_, call, rule), tiling in zip(self.calls, tilings, strict=True)
        ]
        self.states = self.wanted_states()
        self.outputs = {(folded.copies[c].block, e) for c, e in folded.outputs}
        self.loss = (folded.copies[folded.loss[0]].block, folded.loss[1]) if folded.loss else None

    def renamed(self, op: Op) -> Op:
        kind = self.kinds.find
        return Op(
            op.name,
            op.target,
            tuple(map(kind, op.operands)),
            tuple(map(kind, op.results)),
            op.args,
            op.kwargs,
            op.module,
        )

    def call(self, op: Op) -> Call:
        def tensor(name: str) -> Tensor:
            t = self.folded.tensors[name]
            return Tensor(self.kinds.find(name), t.shape, t.dtype, t.differentiable)

        return Call(op.target, op.args, op.kwargs, tuple(map(tensor, op.operands)), tuple(map(tensor, op.results)))

    def wanted_states(self) -> dict[str, set[State]]:
        """The states of each kind of tensor that an operator around it can make use of."""
        found: dict[str, set[State]] = defaultdict(set)
        for (op, _, _), available in zip(self.calls, self.options, strict=True):
            for option in available:
                for name, state in zip((*op.operands, *op.results), (*option.operands, *option.results), strict=True):
                    found[name].add(state)
        for block in self.folded.blocks:
            for name in block.weights:
                shape = self.folded.tensors[name].shape
                found[self.kinds.find(name)] |= {S(d) for d, size in enumerate(shape) if size > 1}
        return found

    def space(self, name: str) -> Space:
        leaf = self.folded.leaf_of.get(name)
        packed = leaf is not None and leaf.kind == "parameter"
        return self.router.space(self.folded.tensors[name], self.states[self.kinds.find(name)], packed)

    def saved(self, call: Call, rule: Rule, known: set[str], op: Op) -> list[bool]:
        """Which operands an operator keeps for its backward pass (each tensor is kept once)."""
        flags = []
        trained = [t.differentiable for t in call.operands]
        for i, name in enumerate(op.operands):
            group = next((g for g in rule.linear if i in g), ())
            needed = (
                not rule.view
                and any(trained)
                and (not group or any(wants and j not in group for j, wants in enumerate(trained)))
            )
            needed = needed and name not in known and name not in self.folded.leaf_of
            if needed:
                known.add(name)
            flags.append(needed)
        return flags

    def block(self, number: int) -> BlockProblem:
        block = self.folded.blocks[number]
        readers: dict[str, int] = defaultdict(int)
        for op in block.ops:
            for name in op.operands:
                readers[name] += 1
        variables: list[Variable] = []
        edges: list[Edge] = []
        source: dict[str, tuple[int, np.ndarray]] = {}  # tensor -> variable, its layout under each choice
        exports: dict[str, int] = {}
        weightlike: set[str] = set(block.weights)  # weights and views of them: their gradients can be sent early

        def publish(name: str, variable: int, layouts: np.ndarray) -> None:
            """Make a tensor readable, through a variable of its own if it has several readers."""
            if name in block.exports or readers[name] > 1:
                space, allowed = self.space(name), np.arange(len(self.space(name)))
                variables.append(TensorVariable(self.folded.tensors[name], space, allowed))
                edges.append(Edge(name, space, variable, len(variables) - 1, layouts, allowed, -1))
                exports[name] = variable = len(variables) - 1
                layouts = allowed
            source[name] = variable, layouts

        for name in block.weights:
            variable = self.weight(name)
            variables.append(variable)
            publish(name, len(variables) - 1, variable.stored)
        known: set[str] = set()
        pending: list[tuple[str, int, int]] = []
        port_layouts: dict[str, np.ndarray] = {name: np.arange(len(self.space(name))) for name in block.ports}
        for i, op in enumerate(block.ops, self.first[number]):
            _, call, rule = self.calls[i]
            spaces = [self.space(name) for name in (*op.operands, *op.results)]
            made = op_table(
                call, rule, [self.options[i]] * len(self.mesh), spaces[: len(op.operands)], spaces[len(op.operands) :],
                self.saved(call, rule, known, op), self.router,
            )  # fmt: skip
            kept = np.arange(len(made))
            if rule.flops or rule.kernel:  # elsewhere nothing is dear enough to be replaced
                kept = self.worth_keeping(op, made, source, port_layouts, weightlike)
            variables.append(OpVariable(op, call, rule, made, kept))
            here = len(variables) - 1
            for position, name in enumerate(op.operands):
                if name in port_layouts:
                    pending.append((name, here, position))
                elif name in source:
                    variable, layouts = source[name]
                    hidden = made.backward_seconds * self.share(op, name, weightlike) if name in weightlike else None
                    edges.append(
                        Edge(name, self.space(name), variable, here, layouts, made.operands[position], position, hidden)
                    )
            if rule.view and weightlike.issuperset(op.operands):
                weightlike.update(op.results)
            for position, name in enumerate(op.results):
                publish(name, here, made.results[position])
        outputs: dict[int, int] = {}
        for e, name in enumerate(block.exports):
            if (number, e) in self.outputs:
                leaving, seen = self.output(name, (number, e) == self.loss)
                variables.append(leaving)
                outputs[e] = len(variables) - 1
                edges.append(Edge(name, leaving.space, exports[name], outputs[e], seen, leaving.allowed, -1))
        own = len(variables)
        for name, here, position in pending:
            port = own + block.ports.index(name)
            target = variables[here]
            assert isinstance(target, OpVariable)
            edges.append(
                Edge(name, self.space(name), port, here, port_layouts[name], target.table.operands[position], position)
            )
        return BlockProblem(
            block, tuple(variables), tuple(edges), tuple(exports[n] for n in block.exports), outputs,
            tuple(len(port_layouts[n]) for n in block.ports),
        )  # fmt: skip

    def worth_keeping(
        self, op: Op, made: OpTable, source: Mapping[str, tuple[int, np.ndarray]], ports: Mapping[str, np.ndarray],
        weightlike: Collection[str],
    ) -> np.ndarray:  # fmt: skip
        operands: list[Space | np.ndarray | None] = []
        for position, name in enumerate(op.operands):
            if name in weightlike:
                stored = source[name][1]
                hidden = made.backward_seconds * self.share(op, name, weightlike)
                edge = Edge(name, self.space(name), 0, 0, stored, made.operands[position], position, hidden)
                operands.append(edge.costs())
            else:
                operands.append(self.space(name) if name in source or name in ports else None)
        return undominated(made, operands, [self.space(name) for name in op.results])

    def share(self, op: Op, name: str, weightlike: Collection[str]) -> float:
        """An operator's backward pass hides the gradients of all its weights together: by their size."""
        sizes = {n: self.folded.tensors[n].nbytes for n in op.operands if n in weightlike}
        return sizes[name] / sum(sizes.values())

    def output(self, name: str, loss: bool) -> tuple[TensorVariable, np.ndarray]:
        """The layouts in which an output may leave, and how its own layouts look from there: the loss is
        wanted whole, others must not be partial sums; no gradient comes back through them."""
        space, tensor = self.space(name), self.folded.tensors[name]
        if not loss:
            tensor = Tensor(tensor.name, tensor.shape, tensor.dtype, False)
        outside = space if loss else self.router.space(tensor, {s.value for s in space.states})
        values = [[s if loss else s.value for s in space.layout(i)] for i in range(len(space))]
        kinds = np.array([s.kind for s in outside.states])[outside.combos]
        allowed = np.flatnonzero((kinds == "R").all(1) if loss else (kinds != "P").all(1))
        return TensorVariable(tensor, outside, allowed), np.array([outside.find(tuple(v)) for v in values])

    def weight(self, name: str) -> WeightVariable:
        tensor, space = self.folded.tensors[name], self.space(name)
        storable = np.array([self.storable(state) for state in space.states])
        tiled = np.array([bool(state.tiling) for state in space.states])
        # DTensor cannot put a packed dim together again that two axes split
        stored = np.flatnonzero(storable[space.combos].all(1) & (tiled[space.combos].sum(1) <= 1))
        seconds = update_seconds(space, self.router.cluster)[stored]
        return WeightVariable(tensor, space, stored, seconds if tensor.differentiable else np.zeros(len(stored)))

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

    def roles(self) -> DimRoles:
        inputs = [leaf.tensor for leaf in self.folded.leaves if leaf.kind == "input"]
        ranks = {name: len(self.folded.tensors[name].shape) for name in inputs}
        seeds = [((name, 0), "batch") for name in inputs if ranks[name]]
        seeds += [((name, 1), "sequence") for name in inputs if ranks[name] == 2]
        return DimRoles([(op, rule) for op, _, rule in self.calls], seeds)

    def build(self) -> Problem:
        blocks = tuple(self.block(b) for b in range(len(self.folded.blocks)))
        missing = tuple(op for op, _, rule in self.calls if rule.missing)
        return Problem(self.folded, self.router, blocks, self.roles(), missing, self.kinds.find)


def build_problem(folded: Folded, router: Router) -> Problem:
    return _Builder(folded, router).build()
