"""Rule out choices that no best plan can take, by dual bounds.

Costs are shifted between tables that share a variable (the sum over any plan stays the same), one variable
after the other, forwards and backwards, so that what each table costs at least, added up, grows: a lower
bound for all plans, and for all plans with a given choice. A choice whose bound exceeds the cost of a known
plan is ruled out. (Sequential dual ascent on the linear relaxation: Kolmogorov's TRW-S.)

Any shifts give a valid bound, so good ones are found on a network with few copies of each block, where
copies in the middle are all alike, and then tried on the whole one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tapas.search.chains import CopyVariable
from tapas.search.monitor import checkpoint
from tapas.search.network import (
    BlockVariable,
    Network,
    common_domains,
    cost_of,
    original_choices,
    restricted_network,
)  # fmt: skip
from tapas.search.run_length import Choices
from tapas.search.topology import BlockCopy

WORK = 6_000_000_000  # table entries looked at: some seconds
ENDS = 2  # so many first and so many last copies of each block are looked at
ROUNDS = 3  # sweeps to and fro between two looks at the bound
TRIES = 20  # times each variable of a plan is reconsidered
SLOW = 0.05  # a round that closes less than this part of the gap is the last
MARGIN = 1e-8  # relative: keep what costs the same but for rounding
IMPOSSIBLE = 1e3  # times the largest cost: in place of infinity, so that differences stay numbers

Shifts = dict[tuple[int, int, int], list[np.ndarray]]  # by copy and the two variables of a table: to either end


@dataclass(frozen=True)
class ReducedNetwork:
    network: Network
    domains: dict[BlockVariable, np.ndarray]  # which choices of the network it came from are still there
    bound: float
    choices: Choices | None  # a plan that was met on the way, in the choices of the network it came from

    def original(self, choices: Choices) -> Choices:
        """A plan of the reduced network in the choices of the network it came from."""
        return original_choices(self.network, self.domains, choices)


def reduce_by_dual_bounds(network: Network, ceiling: float | None, work: float = WORK) -> ReducedNetwork:
    """The network without the choices that cannot be part of a better plan than the best one known, which costs
    `ceiling`, if there is one, or than the best one that is found here.

    All of them stay where a table has more than two variables: that is not worked out here."""
    if any(len(t.scope) > 2 for block in network.blocks for t in block.tables):
        every = {(b, v): np.arange(network.blocks[b].sizes[v]) for b, v in network.own_variables}
        return ReducedNetwork(network, every, -np.inf, None)
    short, image = _shortened(network)
    shifts, few = _dual_ascent(_unfold(short), work)
    whole = _unfold(network)
    whole.apply_shifts(shifts, image)
    best = tuple(few[image[c]] for c in range(len(network.copies)))
    cost = cost_of(network, best)
    bound, rises = whole.lower_bound()
    most = cost if ceiling is None else min(cost, ceiling)
    domains = _surviving_domains(whole, rises, most * (1 + MARGIN) - bound)
    return ReducedNetwork(restricted_network(network, domains), domains, bound, best)


def _shortened(network: Network) -> tuple[Network, list[int]]:
    """The first and last copies of each block; and which of them stands for each copy."""
    copies_of: dict[int, list[int]] = {}
    for c, copy in enumerate(network.copies):
        copies_of.setdefault(copy.block, []).append(c)
    stand_in: dict[int, int] = {}
    for members in copies_of.values():
        middle = members[min(ENDS, len(members) - 1)]
        for position, c in enumerate(members):
            stand_in[c] = c if position <= ENDS or position >= len(members) - ENDS else middle
    place = {c: i for i, c in enumerate(sorted(set(stand_in.values())))}
    image = [place[stand_in[c]] for c in range(len(network.copies))]
    copies = [network.copies[c] for c in place]
    short = tuple(BlockCopy(c.block, tuple((image[p], v) for p, v in c.ports)) for c in copies)
    return Network(network.blocks, short), image


@dataclass(eq=False, slots=True)
class _PairTable:
    """A table of two variables; what has been shifted out of it to either of them."""

    key: tuple[int, int, int]  # copy, and the two variables as its block numbers them
    ends: tuple[int, int]
    array: np.ndarray
    out: list[np.ndarray]

    def minima(self, side: int) -> np.ndarray:
        """For each choice at one end what the table costs at least, shifts to that end not counted."""
        if side == 0:
            return (self.array - self.out[1]).min(1)
        return (self.array - self.out[0][:, None]).min(0)

    def at(self, side: int, choice: int) -> np.ndarray:
        """The costs over the choices at the other end, with the choice at this end made."""
        line = self.array[choice] if side == 0 else self.array[:, choice]
        return line - self.out[side][choice] - self.out[1 - side]


@dataclass
class _Unfolded:
    """The variables of all copies one by one."""

    network: Network
    variables: list[CopyVariable]
    alone: list[np.ndarray]
    pairs: list[_PairTable]
    pairs_of: list[list[tuple[_PairTable, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.pairs_of = [[] for _ in self.variables]
        for pair in self.pairs:
            for side, v in enumerate(pair.ends):
                self.pairs_of[v].append((pair, side))

    def apply_shifts(self, shifts: Shifts, image: Sequence[int]) -> None:
        """Shift costs as in a shorter network."""
        for pair in self.pairs:
            copy, first, second = pair.key
            out = shifts.get((image[copy], first, second))
            if out is not None:
                pair.out = list(out)
                for v, costs in zip(pair.ends, out, strict=True):
                    self.alone[v] = self.alone[v] + costs

    def lower_bound(self) -> tuple[float, list[np.ndarray]]:
        """The bound, and for each variable by how much its choices raise it."""
        total = sum(float(costs.min()) for costs in self.alone)
        rises = [costs - costs.min() for costs in self.alone]
        minima: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
        for pair in self.pairs:
            key = (id(pair.array), *map(id, pair.out))  # most copies in the middle are alike
            if key not in minima:
                minima[key] = pair.minima(0) - pair.out[0], pair.minima(1) - pair.out[1]
            least = minima[key][0].min()
            total += float(least)
            for v, costs in zip(pair.ends, minima[key], strict=True):
                rises[v] += costs - least
        return total, rises

    def sweep(self, forward: bool) -> None:
        """Draw to each variable what its tables cost at least, and hand it on in equal parts."""
        for v in range(len(self.alone)) if forward else range(len(self.alone) - 1, -1, -1):
            checkpoint()
            costs = self.alone[v]
            for pair, side in self.pairs_of[v]:
                least = pair.minima(side)
                costs = costs + (least - pair.out[side])
                pair.out[side] = least
            onward = [(pair, side) for pair, side in self.pairs_of[v] if (pair.ends[1 - side] > v) == forward]
            share = costs / max(len(onward), len(self.pairs_of[v]) - len(onward), 1)
            for pair, side in onward:
                pair.out[side] = pair.out[side] - share
            self.alone[v] = costs - len(onward) * share

    def decode(self, order: Iterable[int]) -> Choices:
        """A plan: one variable after the other, each as is best with those before it; then improved."""
        chosen: dict[int, int] = {}
        for v in order:
            costs = self.alone[v]
            for pair, side in self.pairs_of[v]:
                other = pair.ends[1 - side]
                decided = other in chosen
                costs = costs + (pair.at(1 - side, chosen[other]) if decided else pair.minima(side) - pair.out[side])
            chosen[v] = int(costs.argmin())
        self._improve(chosen)
        choices: list[list[int]] = [[] for _ in self.network.copies]
        for v, (copy, _) in enumerate(self.variables):
            choices[copy].append(chosen[v])
        return tuple(map(tuple, choices))

    def _improve(self, chosen: dict[int, int]) -> None:
        """Reconsider one variable after the other."""
        for _ in range(TRIES):  # not for ever: rounding of shifted costs could go round in circles
            improved = False
            for v, costs in enumerate(self.alone):
                for pair, side in self.pairs_of[v]:
                    costs = costs + pair.at(1 - side, chosen[pair.ends[1 - side]])
                best = int(costs.argmin())
                if costs[best] < costs[chosen[v]] - 1e-12 * abs(costs[best]):
                    chosen[v], improved = best, True
            if not improved:
                break


def _unfold(network: Network) -> _Unfolded:
    finite = [t.array[np.isfinite(t.array)] for block in network.blocks for t in block.tables]
    large = IMPOSSIBLE * (max(float(costs.max(initial=0.0)) for costs in finite) or 1.0)
    shared = {t.uid: np.where(np.isfinite(t.array), t.array, large) for b in network.blocks for t in b.tables}
    variables = [(c, v) for c, copy in enumerate(network.copies) for v in range(network.blocks[copy.block].own)]
    index = {place: number for number, place in enumerate(variables)}
    alone = [np.zeros(network.blocks[network.copies[c].block].sizes[v]) for c, v in variables]
    pairs: list[_PairTable] = []
    for c, copy in enumerate(network.copies):
        block = network.blocks[copy.block]
        for t in block.tables:
            scope = [index[c, v] if v < block.own else index[copy.ports[v - block.own]] for v in t.scope]
            array = shared[t.uid]
            if len(set(scope)) == 1:
                alone[scope[0]] += array if len(scope) == 1 else array.diagonal()
            elif scope:
                key, out = (c, t.scope[0], t.scope[1]), [np.zeros(size) for size in array.shape]
                pairs.append(_PairTable(key, (scope[0], scope[1]), array, out))
    return _Unfolded(network, variables, alone, pairs)


def _dual_ascent(unfolded: _Unfolded, work: float) -> tuple[Shifts, Choices]:
    """Good shifts, and the best plan met on the way."""
    entries = sum(pair.array.size for pair in unfolded.pairs)
    count = len(unfolded.variables)
    best, choices, bound = np.inf, None, -np.inf
    while True:
        for forward in (True, False) * ROUNDS:
            unfolded.sweep(forward)
        for order in (range(count), reversed(range(count))):
            plan = unfolded.decode(order)
            cost = cost_of(unfolded.network, plan)
            if choices is None or cost < best:
                best, choices = cost, plan
        before, (bound, _) = bound, unfolded.lower_bound()
        work -= 2 * entries * (2 * ROUNDS + 2)
        if bound - before <= SLOW * (best - bound) or best - bound <= MARGIN * best or work < 0:
            return {pair.key: pair.out for pair in unfolded.pairs}, choices


def _surviving_domains(
    unfolded: _Unfolded, rises: Sequence[np.ndarray], room: float
) -> dict[BlockVariable, np.ndarray]:
    """What is left in any copy of a block."""
    allowed: dict[BlockVariable, np.ndarray] = {}
    for (c, v), mine in zip(unfolded.variables, rises, strict=True):
        variable = unfolded.network.copies[c].block, v
        allowed[variable] = allowed.get(variable, False) | (mine <= room)
    return common_domains(unfolded.network, allowed)
