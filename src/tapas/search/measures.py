"""Plans measured in several ways at once: by their cost, and by each thing that they use up.

Seconds and bytes are ten orders of magnitude apart, so each measure has a unit in which plans come to about one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapas.search.network import BlockNetwork, Choices, Network, cost_of
from tapas.search.restrict import Own, with_ports
from tapas.search.tables import Table, table

Scope = tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """Something that a plan uses up: amounts in tables over the variables of each block, added up over all copies."""

    blocks: tuple[tuple[Table, ...], ...]  # per block of the network, scopes as in its cost tables
    limit: float

    def amount(self, network: Network, choices: Choices) -> float:
        pairs = zip(network.blocks, self.blocks, strict=True)
        blocks = tuple(BlockNetwork(block.sizes, block.own, tables) for block, tables in pairs)
        return cost_of(Network(blocks, network.copies), choices)


@dataclass(frozen=True, eq=False)
class MultiObjectiveNetwork:
    """The tables of a network by their variables, each with one array per measure: none where that is zero."""

    network: Network  # for its sizes and its wiring: the costs are in `tables` with the rest
    tables: tuple[Mapping[Scope, tuple[np.ndarray | None, ...]], ...]  # per block
    units: tuple[float, ...]

    def weighted(self, weights: Sequence[float]) -> Network:
        """The network that costs a weighted sum of the measures. What is forbidden stays so, at any weight."""
        factors = [weight / unit for weight, unit in zip(weights, self.units, strict=True)]
        blocks = []
        for block, tables in zip(self.network.blocks, self.tables, strict=True):
            summed = [
                table(scope, array) for scope, arrays in tables.items() if (array := _sum(arrays, factors)) is not None
            ]
            # a block may weigh nothing at all, but a network has to have a table
            blocks.append(BlockNetwork(block.sizes, block.own, tuple(summed) or (table((), np.zeros(())),)))
        return Network(tuple(blocks), self.network.copies)

    def stacked(self, block: int) -> list[tuple[Scope, np.ndarray]]:
        """The tables of a block with all measures in one array, in their units, the measure as last dim."""
        found = []
        for scope, arrays in self.tables[block].items():
            shape = next(a.shape for a in arrays if a is not None)
            parts = [np.zeros(shape) if a is None else a / unit for a, unit in zip(arrays, self.units, strict=True)]
            found.append((scope, np.stack(parts, axis=-1)))
        return found

    def restricted(self, kept: Mapping[Own, np.ndarray]) -> "MultiObjectiveNetwork":
        rows = with_ports(self.network, kept)
        blocks, tables = [], []
        for b, block in enumerate(self.network.blocks):
            blocks.append(BlockNetwork(tuple(len(rows[b, v]) for v in range(len(block.sizes))), block.own, ()))
            cuts = {scope: np.ix_(*(rows[b, v] for v in scope)) if scope else () for scope in self.tables[b]}
            tables.append(
                {
                    scope: tuple(None if a is None else a[cuts[scope]] for a in arrays)
                    for scope, arrays in self.tables[b].items()
                }
            )
        return MultiObjectiveNetwork(Network(tuple(blocks), self.network.copies), tuple(tables), self.units)

    def only(self, measures: Sequence[int]) -> "MultiObjectiveNetwork":
        """Fewer measures. What the others forbid is forbidden still."""
        tables = []
        for block in self.tables:
            picked = {}
            for scope, arrays in block.items():
                some = [arrays[m] for m in measures]
                if arrays[0] is not None and 0 not in measures and np.isinf(arrays[0]).any():
                    wall = np.where(np.isinf(arrays[0]), np.inf, 0.0)
                    some[0] = wall if some[0] is None else some[0] + wall
                if any(a is not None for a in some):
                    picked[scope] = tuple(some)
            tables.append(picked)
        return replace(self, tables=tuple(tables), units=tuple(self.units[m] for m in measures))


def _sum(arrays: Sequence[np.ndarray | None], factors: Sequence[float]) -> np.ndarray | None:
    total = None
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
    """A network and its loads; `cost` is about what a plan costs."""
    tables = []
    for b, block in enumerate(network.blocks):
        found: dict[Scope, list[np.ndarray | None]] = {}
        for m, members in enumerate((block.tables, *(load.blocks[b] for load in loads))):
            for t in members:
                if m and not np.isfinite(t.array).all():
                    raise ValueError(f"load {m - 1}, block {b}: not all amounts are finite; forbid by infinite costs")
                scope = tuple(sorted(t.scope))
                array = t.array.transpose([t.scope.index(v) for v in scope])
                known = found.setdefault(scope, [None] * (1 + len(loads)))
                before = known[m]
                known[m] = array if before is None else before + array
        tables.append({scope: tuple(arrays) for scope, arrays in found.items()})
    units = [abs(cost) if np.isfinite(cost) and cost else 1.0, *(_unit(load) for load in loads)]
    return MultiObjectiveNetwork(network, tuple(tables), tuple(units))


def _unit(load: Load) -> float:
    largest = max((float(np.abs(t.array).max(initial=0.0)) for tables in load.blocks for t in tables), default=0.0)
    return max(largest, abs(load.limit)) or 1.0
