"""Optimal choices for a network of repeated blocks: tied, and free to differ from copy to copy.

Three answers come out: the best plan with all copies of a block alike (its cost is added up over
all copies), a lower bound for every plan whatsoever, and, where the bound is lower, the plan that
attains it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from tapas.search.chains import Chain
from tapas.search.contract import WORK, Contraction, Memo, TooMuchWork, contract
from tapas.search.narrow import narrow
from tapas.search.network import Choices, Network, Place, cost_of
from tapas.search.powers import Powers
from tapas.search.runs import count_choices
from tapas.search.tables import Table, diagonal_table, table
from tapas.search.wiring import topology_of

BUDGETS = (60_000, 600_000, 6_000_000, 40_000_000)  # entries of the largest table
SMALLEST = 2_000  # budget of last resort: always fast enough, bounds may be loose
TOLERANCE = 1e-9  # relative: what rounding may do to sums of the same numbers


@dataclass(frozen=True)
class SearchAnswer:
    choices: Choices
    cost: float
    bound: float
    alike: bool  # all copies of a block choose the same

    @property
    def gap(self) -> float:
        return max(0.0, self.cost - self.bound)


def solve(network: Network, budgets: Sequence[int] = BUDGETS) -> SearchAnswer:
    """The best plan. Small tables are tried first: mostly their bound is already tight. Where alike
    copies are as good as differing ones, they are alike."""
    largest = max(t.array.size for block in network.blocks for t in block.tables)
    enough = max(largest, budgets[0])  # for a network of small treewidth
    best, bound = _climb(network, sorted({budgets[0], enough}))
    if best is None or not _reaches(best.cost, bound):
        narrowed = narrow(network, best.choices if best else None)
        if narrowed.choices is not None:
            best = _better(network, best, narrowed.choices)
        found, bound = _climb(narrowed.network, sorted({*budgets, enough}), max(bound, narrowed.bound))
        if found is not None:
            best = _better(network, best, narrowed.original(found.choices))
    if best is None:
        best, bound = _climb(network, [SMALLEST], bound, np.inf)
        assert best is not None
    return SearchAnswer(best.choices, best.cost, min(bound, best.cost), best.alike)


def _reaches(cost: float, bound: float) -> bool:
    return cost <= bound * (1 + TOLERANCE)


def _climb(
    network: Network, budgets: Sequence[int], bound: float = -np.inf, limit: float = WORK
) -> tuple[SearchAnswer | None, float]:
    """Contract with larger and larger tables, until it is exact or takes too long."""
    best: SearchAnswer | None = None
    for budget in budgets:
        try:
            found, free, exact = _solve_free(network, budget, limit)
            bound = max(bound, found)
            for attempt in (_itself, _most_common, _solve_tied):
                if best is None or not best.alike or not _reaches(best.cost, bound):
                    best = _better(network, best, attempt(network, free, budget, limit))
        except TooMuchWork:
            continue
        if exact or (best is not None and _reaches(best.cost, bound)):
            break
    return best, bound


def _better(network: Network, best: SearchAnswer | None, choices: Choices) -> SearchAnswer:
    """The cheaper of two answers; of equally good ones the one whose copies are alike."""
    found = SearchAnswer(choices, cost_of(network, choices), -np.inf, copies_alike(network, choices))
    if best is None or found.cost < best.cost * (1 - TOLERANCE):
        return found
    return found if found.alike and not best.alike and found.cost <= best.cost * (1 + TOLERANCE) else best


def _itself(network: Network, choices: Choices, budget: int, limit: float) -> Choices:
    return choices


def copies_alike(network: Network, choices: Choices) -> bool:
    return len(count_choices(network.copies, choices)) == len(network.blocks)


def _most_common(network: Network, choices: Choices, budget: int, limit: float) -> Choices:
    """All copies of a block as most of them are."""
    winner = {block: own for (block, own), _ in reversed(count_choices(network.copies, choices).most_common())}
    return topology_of(network.copies).spread_over_copies(winner)


def quotient_network(network: Network) -> tuple[list[Table], dict[int, int], dict[tuple[int, int], int]]:
    """The quotient: one variable per block and own variable, every table counted once per copy."""
    index = {
        (b, v): number
        for number, (b, v) in enumerate((b, v) for b, block in enumerate(network.blocks) for v in range(block.own))
    }
    sizes = {number: network.blocks[b].sizes[v] for (b, v), number in index.items()}
    wirings, copies = topology_of(network.copies).read_patterns, topology_of(network.copies).copy_counts
    tables = []
    for b, block in enumerate(network.blocks):
        here = [(ports, times) for (which, ports), times in wirings.items() if which == b]
        for t in block.tables:
            if all(v < block.own for v in t.scope):
                tables.append(diagonal_table([index[b, v] for v in t.scope], t.array * copies[b]))
                continue
            for ports, times in here:
                scope = [index[b, v] if v < block.own else index[ports[v - block.own]] for v in t.scope]
                tables.append(diagonal_table(scope, t.array * times))
    return tables, sizes, index


def _solve_tied(network: Network, _: Choices, budget: int, limit: float) -> Choices:
    tables, sizes, index = quotient_network(network)
    contraction = contract(tables, sizes, budget=budget, limit=limit)
    found = contraction.decode({})
    if not contraction.exact:
        found = coordinate_descent(tables, sizes, found)
    own = {b: tuple([found[index[b, v]] for v in range(block.own)]) for b, block in enumerate(network.blocks)}
    return topology_of(network.copies).spread_over_copies(own)


def _solve_free(network: Network, budget: int, limit: float) -> tuple[float, Choices, bool]:
    """Lower bound over all plans, copies free to differ; and the plan that the contraction suggests."""
    wiring = topology_of(network.copies)
    exported = wiring.exported
    inner = []
    for b, block in enumerate(network.blocks):
        keep = {*exported[b], *range(block.own, len(block.sizes))}
        inner.append(contract(block.tables, dict(enumerate(block.sizes)), keep, budget, limit=limit))
    ends = _chained(network, inner, exported, budget, limit)
    number: dict[Place, int] = {}
    fresh = count()
    tables: list[Table] = []
    sizes: dict[int, int] = {}
    for c in sorted((*wiring.unchained, *ends)):  # a chain speaks for its copies, all but the last
        copy = network.copies[c]
        block = network.blocks[copy.block]
        for v in exported[copy.block]:
            number[c, v] = next(fresh)
            sizes[number[c, v]] = block.sizes[v]
        if c in ends:
            chain, powers = ends[c]
            own, made = [number[c, v] for v in exported[copy.block]], powers.of(chain.length)
            names = dict(enumerate((*(number[place] for place in network.copies[chain.first].ports), *own)))
        else:
            made = inner[copy.block].tables
            names = {v: number[c, v] for v in exported[copy.block]}
            names |= {block.own + i: number[place] for i, place in enumerate(copy.ports)}
        for t in made:
            scope = tuple(names[v] for v in t.scope)
            # two ports may be bound to one variable in some copies: then only the diagonal counts
            tables.append(t.on(scope) if len(set(scope)) == len(scope) else diagonal_table(scope, t.array))
    outer = contract(tables, sizes, budget=budget, memo=Memo(), limit=limit)
    found = outer.decode({})
    exports: dict[Place, int] = {place: found[n] for place, n in number.items()}
    choices: list[tuple[int, ...]] = [()] * len(network.copies)
    decoded: dict[tuple, tuple[int, ...]] = {}  # most copies find the same around them: decode once

    def chosen(b: int, own: tuple[int, ...], ports: tuple[int, ...]) -> tuple[int, ...]:
        """The choices of a copy, given what it exports and reads."""
        if (b, own, ports) not in decoded:
            first = network.blocks[b].own
            known = (*exported[b], *range(first, first + len(ports)))
            full = inner[b].decode(dict(zip(known, (*own, *ports), strict=True)))
            decoded[b, own, ports] = tuple(full[v] for v in range(first))
        return decoded[b, own, ports]

    for c in wiring.unchained:
        copy = network.copies[c]
        own = tuple(exports[c, v] for v in exported[copy.block])
        choices[c] = chosen(copy.block, own, tuple(exports[place] for place in copy.ports))
    for end, (chain, powers) in ends.items():
        b, c = network.copies[end].block, chain.first
        ports = tuple(exports[place] for place in network.copies[c].ports)
        for own, read, times in powers.runs(chain.length, ports, tuple(exports[end, v] for v in exported[b])):
            choices[c : c + times] = [chosen(b, own, read)] * times
            c += times
    exact = outer.exact and all(made.exact for made in (*inner, *(powers for _, powers in ends.values())))
    return outer.value, tuple(choices), exact


def _chained(
    network: Network, inner: Sequence[Contraction], exported: Mapping[int, tuple[int, ...]], budget: int, limit: float
) -> dict[int, tuple[Chain, Powers]]:
    """Chains by the numbers of their last copies; those of one block share their powers."""
    shared: dict[tuple, Powers] = {}
    ends: dict[int, tuple[Chain, Powers]] = {}
    for chain in topology_of(network.copies).chains:
        b = network.copies[chain.first].block
        block, key = network.blocks[b], (b, chain.feeds)
        if key not in shared:
            shared[key] = Powers(inner[b].tables, block.sizes, exported[b], block.own, chain.feeds, budget, limit)
        ends[chain.stop - 1] = chain, shared[key]
    return ends


def coordinate_descent(tables: Sequence[Table], sizes: dict[int, int], choices: dict[int, int]) -> dict[int, int]:
    """Improve an assignment one variable at a time until nothing helps."""
    of: dict[int, list[Table]] = {v: [] for v in sizes}
    for t in tables:
        for v in t.scope:
            of[v].append(t)
    found = dict(choices)
    improved = True
    while improved:
        improved = False
        for variable, involved in of.items():
            costs = sum(
                (t.array[tuple(slice(None) if v == variable else found[v] for v in t.scope)] for t in involved),
                start=np.zeros(sizes[variable]),
            )
            best = int(np.argmin(costs))
            if costs[best] < costs[found[variable]] - 1e-15:
                found[variable], improved = best, True
    return found


def brute_force(tables: Sequence[Table], sizes: dict[int, int]) -> float:
    """The optimum by trying everything: for tests."""
    total = table((), np.zeros(()))
    scope = tuple(sizes)
    array = np.zeros(tuple(sizes.values()))
    for t in (*tables, total):
        place = {v: i for i, v in enumerate(t.scope)}
        align_to_scope = t.array.transpose([place[v] for v in scope if v in place])
        array = array + align_to_scope[tuple(slice(None) if v in place else None for v in scope)]
    return float(array.min())
