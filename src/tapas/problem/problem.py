"""Folded graph + rules + routing + cost -> number tables for the search, and the way back.

Variables: one per operator (its choice), per weight (how it is stored), and per tensor that several
operators read or that leaves its block (the layout in which all of them find it: a move is paid once
however many readers there are). Edges carry the cheapest route between the layouts at their ends.
Inputs, buffers and constants are no variables: whoever reads them slices what it needs, for free.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tapas.cost.collectives import ClusterRouter
from tapas.cost.memory import ADAM, Optimizer
from tapas.cost.operators import OpTable
from tapas.errors import PlanError, nearest
from tapas.ir.fold import Block, Folded
from tapas.ir.graph import Op, Tensor
from tapas.rules.base import KEEP, MODES, RECOMPUTED, Call, Rule, gathered_again, repeated
from tapas.rules.dim_roles import DimRoles
from tapas.search import BlockNetwork, Choices, LazyCopies, Network, choice_runs, table, topology_of
from tapas.sharding.routing import LayoutSpace


@dataclass(frozen=True)
class OpVariable:
    op: Op
    call: Call
    rule: Rule
    table: OpTable
    kept: np.ndarray  # choices that no other one replaces; all that matter as long as nothing is pinned
    saves: tuple[bool, ...]  # for the backward pass: which of its operands, and then of its results

    @property
    def saves_results(self) -> bool:
        return any(self.saves[len(self.op.operands) :])

    @property
    def seconds(self) -> np.ndarray:
        return self.table.seconds


@dataclass(frozen=True)
class WeightVariable:
    tensor: Tensor
    space: LayoutSpace
    stored: np.ndarray  # the layouts it may be stored in, numbers in its space
    seconds: np.ndarray  # of the optimizer's update


@dataclass(frozen=True)
class TensorVariable:
    tensor: Tensor
    space: LayoutSpace
    allowed: np.ndarray  # layouts, numbers in its space

    @property
    def seconds(self) -> np.ndarray:
        return np.zeros(len(self.allowed))


@dataclass(frozen=True)
class ModeVariable:
    """What a copy does about its activations and gathered weights, see MODES."""

    modes: tuple[str, ...]

    @property
    def seconds(self) -> np.ndarray:
        return np.zeros(len(self.modes))


LayoutVariable = OpVariable | WeightVariable | TensorVariable
Variable = LayoutVariable | ModeVariable

SLIGHT = 1e-10  # of what is hidden counts in any case: of plans that take the same time, the one that sends less wins
AUTO = "auto"  # whichever of them is best


def check_mode(mode: str) -> None:
    if mode not in (AUTO, *MODES):
        raise PlanError(f"--recompute {mode}", "is not known", nearest(mode, [AUTO, *MODES]))


@dataclass(frozen=True)
class Edge:
    """A tensor on its way from one variable to another. Numbers from `own` on are ports."""

    tensor: str  # by the name of the block's first copy
    space: LayoutSpace
    source: int
    target: int
    source_layouts: np.ndarray  # [choice of source] -> layout number
    target_layouts: np.ndarray
    operand: int  # of the target operator; -1 if the target is a tensor variable
    hidden: np.ndarray | None = None  # backward seconds of the target behind which gradients can hide
    # Forward seconds of the target behind which its weight can be gathered. The runtime gathers the weights of a block
    # while the one before it computes; of copies that do the same, that hides at least what this does: the rest of a
    # sum is at most the sum of the rests.
    ahead: np.ndarray | None = None
    overlap: float = 1.0  # the cluster's

    def costs(self, source: np.ndarray | None = None, target: np.ndarray | None = None) -> np.ndarray:
        """Seconds for some choices (by default all) of the variables at both ends."""
        before, after = self._layouts(source, target)
        if self.hidden is None and self.ahead is None:
            return self.space.seconds[before[:, None], after]
        total, forward = self.space.between(before, after)
        hidden = self._rest(forward, self.ahead, target) + self._rest(total - forward, self.hidden, target)
        # what is exchanged is sent where it is read, and so is its gradient
        return np.where(self.space.exchanged(before, after), total, hidden)

    def again(self, computed: bool, source: np.ndarray | None = None, target: np.ndarray | None = None) -> np.ndarray:
        """What the forward part takes if it comes a second time, in the backward pass: a weight that is gathered again
        hides behind what its gradient leaves of the target's backward pass, and behind its forward pass if that is
        `computed` again, too."""
        ends = self._layouts(source, target)
        total, forward = self.space.between(*ends)
        if self.ahead is None:
            return forward
        rest = forward
        if self.hidden is not None:
            hidden = self.hidden if target is None else self.hidden[target]
            left = np.maximum(hidden - (total - forward), 0.0)
            rest = forward - self.overlap * np.minimum(forward, left)
        rest = self._rest(rest, self.ahead, target) if computed else rest
        return np.where(self.space.exchanged(*ends), forward, rest)

    def _rest(self, seconds: np.ndarray, hiding: np.ndarray | None, target: np.ndarray | None) -> np.ndarray:
        """What is waited for of some that runs beside those of the target's choices."""
        if hiding is None:
            return seconds
        beside = np.minimum(seconds, (hiding if target is None else hiding[target])[None, :])
        return seconds - min(self.overlap, 1 - SLIGHT) * beside

    def _layouts(self, source: np.ndarray | None, target: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        before = self.source_layouts if source is None else self.source_layouts[source]
        return before, self.target_layouts if target is None else self.target_layouts[target]


@dataclass(frozen=True)
class BlockProblem:
    block: Block
    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...]
    exports: tuple[int, ...]  # the tensor variable of each export
    outputs: dict[int, int]  # export that leaves the model -> the variable that says in which layout
    ports: tuple[LayoutSpace, ...]  # as the tensors are left
    mode: int | None = None  # the variable that says what happens to activations, if there is a choice
    port_copies: tuple[int, ...] = ()  # copies that read the same tensor through a port, this one included
    saved: frozenset[str] = frozenset()  # tensors that operators keep for the backward pass
    kept_ports: frozenset[int] = frozenset()  # whose tensors are kept by those who made them, too

    @cached_property
    def gathered(self) -> dict[int, tuple[bool, bool]]:
        """For every weight: whether other blocks read it, and whether operators keep it for the backward pass."""
        found: dict[int, tuple[bool, bool]] = {}
        for v, variable in enumerate(self.variables):
            if isinstance(variable, WeightVariable):
                through = {edge.target for edge in self.edges if edge.source == v} - self._operators
                exported = not through.isdisjoint(self.exports)
                found[v] = exported, any(self._keeps(edge) for edge in self.edges if edge.source in {v, *through})
        return found

    @cached_property
    def _operators(self) -> set[int]:
        return {v for v, variable in enumerate(self.variables) if isinstance(variable, OpVariable)}

    def _keeps(self, edge: Edge) -> bool:
        target = self.variables[edge.target]
        return isinstance(target, OpVariable) and target.saves[edge.operand]

    def moved_again(self, edge: Edge, mode: str) -> bool:
        """Whether what an edge does in the forward pass is done a second time for the backward pass."""
        if edge.source in self.gathered:
            return gathered_again(mode, *self.gathered[edge.source])
        return mode in RECOMPUTED

    def again_seconds(
        self, edge: Edge, mode: str, source: np.ndarray | None = None, target: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Of an edge in a mode; None if it does nothing a second time."""
        if not self.moved_again(edge, mode):
            return None
        reader = self.variables[edge.target]
        return edge.again(isinstance(reader, OpVariable) and repeated(mode, reader.rule), source, target)

    def mode_of(self, choices: Sequence[int]) -> str:
        if self.mode is None:
            return KEEP
        variable = self.variables[self.mode]
        assert isinstance(variable, ModeVariable)
        return variable.modes[choices[self.mode]]


Rows = Mapping[tuple[int, int], np.ndarray]  # (block, variable) -> the choices left


@dataclass(frozen=True)
class Problem:
    folded: Folded
    router: ClusterRouter
    blocks: tuple[BlockProblem, ...]
    roles: DimRoles
    missing: tuple[Op, ...]  # operators without a rule
    name_of: Callable[[str], str]  # a tensor's name -> that of the kind of tensor it is one of
    optimizer: Optimizer = ADAM

    @cached_property
    def unread(self) -> frozenset[str]:
        """Parameters that no operator reads: they are stored whole, and that is all."""
        leaves = self.folded.leaf_of.distinct
        read = sum([self.copies[b] * len(block.weights) for b, block in enumerate(self.folded.blocks)])
        if read == sum([times for leaf, times in leaves if leaf.kind == "parameter"]):  # no two copies have the same
            return frozenset()
        weights = {name for copy in self.folded.copies for name in copy.weights}
        return frozenset([leaf.tensor for leaf in self.folded.parameters if leaf.tensor not in weights])

    @cached_property
    def copies(self) -> Counter[int]:
        """How many copies each block has."""
        return topology_of(self.folded.copies).copy_counts

    @cached_property
    def parameters(self) -> int:
        """How many numbers the model's parameters have."""
        tensors, copies = self.folded.tensors, self.copies
        per_block = (sum(tensors[name].elements for name in block.weights) for block in self.folded.blocks)
        return sum(copies[b] * n for b, n in enumerate(per_block)) + sum(tensors[name].elements for name in self.unread)

    @cached_property
    def besides(self) -> tuple[int, int]:
        """Bytes of buffers and constants, and of parameters that nobody reads: the same for every plan."""
        tensors = self.folded.tensors
        held = [(leaf.tensor, n) for leaf, n in self.folded.leaf_of.distinct if leaf.kind in ("buffer", "constant")]
        whole = sum(n * tensors[name].nbytes for name, n in held) - self.resident
        return whole, sum(tensors[name].nbytes for name in self.unread)

    @cached_property
    def resident(self) -> int:
        """Bytes of the buffers of which every rank holds a part."""
        return sum(
            self.copies[b] * variable.call.operands[variable.rule.resident].nbytes
            for b, part in enumerate(self.blocks)
            for variable in part.variables
            if isinstance(variable, OpVariable) and variable.rule.resident is not None
        )

    def rows(self, pinned: Rows | None = None) -> dict[tuple[int, int], np.ndarray]:
        """The choices that matter as long as memory does not: those that the pins leave, elsewhere those that
        nothing replaces. Activations are kept: nothing is faster."""
        found: dict[tuple[int, int], np.ndarray] = {}
        for b, part in enumerate(self.blocks):
            for v, variable in enumerate(part.variables):
                if isinstance(variable, OpVariable) and len(variable.kept) < len(variable.table):
                    found[b, v] = variable.kept
                elif isinstance(variable, ModeVariable):
                    found[b, v] = np.array([variable.modes.index(KEEP)])
        return found | dict(pinned or {})

    def network(self, rows: Rows) -> Network:
        """The tables, restricted to some choices of some variables."""
        blocks = [_tables(part, self.rows_of(b, rows)) for b, part in enumerate(self.blocks)]
        return Network(tuple(blocks), self.wiring)

    def rows_of(self, block: int, rows: Rows) -> list[np.ndarray | None]:
        """What is left of a block's variables and ports; None where that is everything."""
        part = self.blocks[block]
        own = [rows.get((block, v)) for v in range(len(part.variables))]
        return own + [self._port_rows(block, i, rows) for i in range(len(part.ports))]

    def widened(self, choices: Choices, rows: Rows) -> Choices:
        """Choice numbers of the restricted tables as those of the full ones."""
        return self.renumbered(choices, lambda b, v, i: int(rows[b, v][i]) if (b, v) in rows else i)

    def renumbered(self, choices: Choices, number: Callable[[int, int, int], int]) -> Choices:
        """A plan by other numbers, given those for the choice of a block's variable."""
        known: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}  # copies share their choices, and go on to do so
        found: list[tuple[int, ...]] = []
        for run in choice_runs(self.wiring, choices):
            key = run.block, run.own
            if key not in known:
                known[key] = tuple([number(run.block, v, i) for v, i in enumerate(run.own)])
            found += [known[key]] * run.times
        return tuple(found)

    @cached_property
    def wiring(self) -> LazyCopies:
        return LazyCopies(self.folded.copies, [part.exports for part in self.blocks])

    @cached_property
    def _bound(self) -> dict[tuple[int, int], set[tuple[int, int]]]:
        """The variables (block, number) that each port (block, number) is bound to in some copy."""
        found: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        for block, places in topology_of(self.folded.copies).read_patterns:
            for port, (source, e) in enumerate(places):
                found[block, port].add((source, self.blocks[source].exports[e]))
        return found

    def _port_rows(self, block: int, port: int, rows: Rows) -> np.ndarray | None:
        """A port has the choices of the tensor variable it is bound to (the same for all copies)."""
        found = [rows.get(place) for place in self._bound[block, port]]
        first = found[0]
        same = (f is None if first is None else f is not None and np.array_equal(f, first) for f in found)
        if not all(same):
            raise ValueError("copies of a block read tensors that are pinned differently")
        return first


def _tables(part: BlockProblem, kept: Sequence[np.ndarray | None]) -> BlockNetwork:
    own, modes = len(part.variables), _modes(part, kept)
    sizes, tables, again = [], [], []
    for v, variable in enumerate(part.variables):
        costs = variable.seconds if kept[v] is None else variable.seconds[kept[v]]
        sizes.append(len(costs))
        tables.append(table((v,), costs))
        if part.mode is not None and modes and isinstance(variable, OpVariable):
            seconds = variable.table.again_seconds if kept[v] is None else variable.table.again_seconds[kept[v]]
            times = np.array([float(repeated(mode, variable.rule)) for mode in modes])
            again.append(table((part.mode, v), np.multiply.outer(times, seconds)))
    for space, chosen in zip(part.ports, kept[own:], strict=True):
        sizes.append(len(space) if chosen is None else len(chosen))
    for edge in part.edges:
        if len(edge.space) == 1:
            continue  # it is where it has to be
        ends = kept[edge.source], kept[edge.target]
        costs = edge.costs(*ends)
        tables.append(table((edge.source, edge.target), costs))
        seconds = [part.again_seconds(edge, mode, *ends) for mode in modes]
        if part.mode is not None and any(some is not None and some.any() for some in seconds):
            every = np.stack([np.zeros(costs.shape) if some is None else some for some in seconds])
            again.append(table((part.mode, edge.source, edge.target), every))
    return BlockNetwork(tuple(sizes), own, (*tables, *again))


def _modes(part: BlockProblem, kept: Sequence[np.ndarray | None]) -> Sequence[str]:
    """What a block may do about its activations, if it may compute them again."""
    variable = part.variables[part.mode] if part.mode is not None else None
    if part.mode is None or not isinstance(variable, ModeVariable):
        return ()
    chosen = kept[part.mode]
    modes = variable.modes if chosen is None else [variable.modes[i] for i in chosen]
    return () if set(modes) == {KEEP} else modes
