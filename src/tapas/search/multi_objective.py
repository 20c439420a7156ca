"""Plans measured by several objectives at once: by their cost, and by each thing that they use up.

Seconds and bytes are ten orders of magnitude apart, so each objective has a unit in which plans come to about one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapas.search.cost_tables import Table, evaluate, table
from tapas.search.elimination_order import Scope
from tapas.search.network import BlockNetwork, Domains, Network, cost_of, domains_with_ports
from tapas.search.run_length import Choices, choice_runs
from tapas.search.topology import BlockCopy, topology_of

ObjectiveArrays = tuple[np.ndarray | None, ...]  # one per objective: none where that is zero


@dataclass(frozen=True)
class Load:
    """Something that a plan uses up: amounts in tables over the variables of each block, added up over all copies."""

    blocks: tuple[tuple[Table, ...], ...]  # per block of the network, scopes as in its cost tables
    limit: float
    turns: tuple[tuple[Table, ...], ...] = ()  # the same for what only the most demanding of these copies adds

    def amount(self, network: Network, choices: Choices) -> float:
        pairs = zip(network.blocks, self.blocks, strict=True)
        blocks = tuple(BlockNetwork(block.sizes, block.own, tables) for block, tables in pairs)
        total = cost_of(Network(blocks, network.copies), choices)
        runs = [run for run in choice_runs(network.copies, choices) if self.turns and self.turns[run.block]]
        turns = (evaluate(self.turns[run.block], dict(enumerate((*run.own, *run.ports)))) for run in runs)
        return total + max(turns, default=0.0)


@dataclass(frozen=True, slots=True)
class TurnColumn:
    """What the most demanding of some copies adds to an objective; their mean is no more than that."""

    objective: int
    copies: int


@dataclass(frozen=True, slots=True)
class LinearCut:
    """No plan that is looked for has more than `most` of this weighted sum of the objectives."""

    weights: tuple[float, ...]
    most: float
    value: bool  # how far a plan stays below is by how much it may be better than the best one known


@dataclass(frozen=True, eq=False)
class MultiObjectiveNetwork:
    """The tables of a network by their variables, each with one array per objective."""

    network: Network  # for its sizes and its wiring: the costs are in `tables` with the rest
    tables: tuple[Mapping[Scope, ObjectiveArrays], ...]  # per block
    units: tuple[float, ...]
    turns: tuple[TurnColumn, ...] = ()  # arrays that come after those of the objectives

    def columns(self, numbers: Sequence[float]) -> np.ndarray:
        """Weights of the objectives as those of all columns: of turns, the mean counts."""
        return np.array([*numbers, *(numbers[turn.objective] / turn.copies for turn in self.turns)])

    @property
    def column_units(self) -> list[float]:
        return [*self.units, *(self.units[turn.objective] for turn in self.turns)]

    def weighted(self, weights: Sequence[float]) -> Network:
        """The network that costs a weighted sum of the objectives. What is forbidden stays so, at any weight."""
        factors = (self.columns(weights) / self.column_units).tolist()
        blocks: list[BlockNetwork] = []
        for block, tables in zip(self.network.blocks, self.tables, strict=True):
            sums = ((scope, _weighted_sum(arrays, factors)) for scope, arrays in tables.items())
            summed = tuple([table(scope, array) for scope, array in sums if array is not None])
            # a block may weigh nothing at all, but a network has to have a table
            blocks.append(BlockNetwork(block.sizes, block.own, summed or (table((), np.zeros(())),)))
        return Network(tuple(blocks), self.network.copies)

    def stacked(self, block: int) -> list[tuple[Scope, np.ndarray]]:
        """The tables of a block with all objectives in one array, in their units, the objective as last dim."""
        stacked: list[tuple[Scope, np.ndarray]] = []
        for scope, arrays in self.tables[block].items():
            shape = next(a.shape for a in arrays if a is not None)
            pairs = zip(arrays, self.column_units, strict=True)
            parts = [np.zeros(shape) if a is None else a / unit for a, unit in pairs]
            stacked.append((scope, np.stack(parts, axis=-1)))
        return stacked

    def restricted(self, domains: Domains) -> "MultiObjectiveNetwork":
        complete = domains_with_ports(self.network, domains)
        blocks: list[BlockNetwork] = []
        tables: list[dict[Scope, ObjectiveArrays]] = []
        for b, block in enumerate(self.network.blocks):
            sizes = tuple(len(complete[b, v]) for v in range(len(block.sizes)))
            blocks.append(BlockNetwork(sizes, block.own, ()))
            rest: dict[Scope, ObjectiveArrays] = {}
            for scope, arrays in self.tables[b].items():
                rows = np.ix_(*(complete[b, v] for v in scope)) if scope else ()
                rest[scope] = tuple(None if a is None else a[rows] for a in arrays)
            tables.append(rest)
        return replace(self, network=Network(tuple(blocks), self.network.copies), tables=tuple(tables))

    def select(self, objectives: Sequence[int]) -> "MultiObjectiveNetwork":
        """Fewer objectives. What the others forbid is forbidden still."""
        tables: list[dict[Scope, ObjectiveArrays]] = []
        turns = [(t, turn) for t, turn in enumerate(self.turns, len(self.units)) if turn.objective in objectives]
        for block in self.tables:
            selected: dict[Scope, ObjectiveArrays] = {}
            for scope, arrays in block.items():
                some = [arrays[m] for m in (*objectives, *(t for t, _ in turns))]
                if arrays[0] is not None and 0 not in objectives and np.isinf(arrays[0]).any():
                    wall = np.where(np.isinf(arrays[0]), np.inf, 0.0)
                    some[0] = wall if some[0] is None else some[0] + wall
                if any(a is not None for a in some):
                    selected[scope] = tuple(some)
            tables.append(selected)
        kept = tuple([replace(turn, objective=objectives.index(turn.objective)) for _, turn in turns])
        return replace(self, tables=tuple(tables), units=tuple([self.units[m] for m in objectives]), turns=kept)


def _weighted_sum(arrays: Sequence[np.ndarray | None], factors: Sequence[float]) -> np.ndarray | None:
    total: np.ndarray | None = None
    for array, factor in zip(arrays, factors, strict=True):
        if array is None:
            continue
        if factor:
            part = array * factor
        elif np.isinf(array).any():
            part = np.where(np.isinf(array), np.inf, 0.0)
        else:
            continue
        total = part if total is None else total + part
    return total


def multi_objective(network: Network, loads: Sequence[Load], cost: float) -> MultiObjectiveNetwork:
    """A network and its loads; `cost` is about what a plan costs. Blocks that no objective tells apart become one:
    copies keep their places and their choices."""
    blocks: list[dict[Scope, ObjectiveArrays]] = []
    turned = [(k, load.turns) for k, load in enumerate(loads, 1) if load.turns]
    columns = 1 + len(loads) + len(turned)
    for b, block in enumerate(network.blocks):
        arrays: dict[Scope, list[np.ndarray | None]] = {}
        amounts = (*(load.blocks[b] for load in loads), *(turns[b] for _, turns in turned))
        for m, tables in enumerate((block.tables, *amounts)):
            for t in tables:
                if m and not np.isfinite(t.array).all():
                    raise ValueError(f"load {m - 1}, block {b}: not all amounts are finite; forbid by infinite costs")
                scope = tuple(sorted(t.scope))
                array = t.array.transpose([t.scope.index(v) for v in scope])
                of_scope = arrays.setdefault(scope, [None] * columns)
                before = of_scope[m]
                of_scope[m] = array if before is None else before + array
        blocks.append({scope: tuple(of_scope) for scope, of_scope in arrays.items()})
    units = [abs(cost) if np.isfinite(cost) and cost else 1.0, *(_unit(load) for load in loads)]
    counts = topology_of(network.copies).copy_counts
    turns = tuple([TurnColumn(k, sum(counts[b] for b, own in enumerate(t) if own)) for k, t in turned])
    return _merge_equal_blocks(MultiObjectiveNetwork(network, tuple(blocks), tuple(units), turns))


def _merge_equal_blocks(objectives: MultiObjectiveNetwork) -> MultiObjectiveNetwork:
    """The same network with one block in place of several equal ones: longer chains, and less to contract."""
    network, tables = objectives.network, objectives.tables
    first: dict[int, int] = {}  # by block, the first one that is equal
    for b, block in enumerate(network.blocks):
        equal = (
            a for a in dict.fromkeys(first.values())
            if (network.blocks[a].sizes, network.blocks[a].own) == (block.sizes, block.own)
            and _equal_tables(tables[a], tables[b])
        )  # fmt: skip
        first[b] = next(equal, b)
    left = sorted({*first.values()})
    if len(left) == len(first):
        return objectives
    copies = tuple([BlockCopy(left.index(first[copy.block]), copy.ports) for copy in network.copies])
    blocks = tuple([network.blocks[b] for b in left])
    return replace(objectives, network=Network(blocks, copies), tables=tuple([tables[b] for b in left]))


def _equal_tables(some: Mapping[Scope, ObjectiveArrays], others: Mapping[Scope, ObjectiveArrays]) -> bool:
    return some.keys() == others.keys() and all(
        (a is None) == (b is None) and (a is None or b is None or np.array_equal(a, b))
        for scope in some
        for a, b in zip(some[scope], others[scope], strict=True)
    )


def _unit(load: Load) -> float:
    largest = max((float(np.abs(t.array).max(initial=0.0)) for tables in load.blocks for t in tables), default=0.0)
    return max(largest, abs(load.limit)) or 1.0
