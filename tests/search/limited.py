"""Random problems with limits: of any wiring, chains, and steps of training with their moments.

Costs and amounts are whole numbers of some unit, so that a plan keeps a limit or exceeds it by a unit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tapas.search import (
    BlockCopy,
    BlockNetwork,
    Choices,
    Load,
    Network,
    Overrun,
    SearchProblem,
    SearchResult,
    Table,
    cost_of,
    solve_within,
    table,
)
from tests.oracle.side import least_within

SECONDS, BYTES = 1e-4, 1e9
CLOSE = 1e-3  # of a unit: what differs by less is the same but for rounding
Random = np.random.Generator


def limit_between(network: Network, load: Load, random: Random) -> Load:
    """A limit that some plans keep and others do not; sometimes none."""
    owned = [network.blocks[copy.block].sizes[: network.blocks[copy.block].own] for copy in network.copies]
    some = [tuple(tuple(random.integers(own).tolist()) for own in owned) for _ in range(30)]
    some += [tuple((choice,) * len(own) for own in owned) for choice in range(min(min(own) for own in owned))]
    amounts = [load.amount(network, choices) for choices in some]
    where = min(amounts) + (max(amounts) - min(amounts)) * random.uniform(-0.1, 0.7)
    return replace(load, limit=float(np.floor(where / BYTES) * BYTES))


def any_wiring(seed: int) -> tuple[Network, list[Load]]:
    """Blocks with a mode that most tables look at, copies that read any earlier variable, 1-3 loads."""
    random = np.random.default_rng(seed)

    def tables(sizes: tuple[int, ...], count: int, unit: float, forbid: float) -> tuple[Table, ...]:
        made = []
        for _ in range(count):
            scope = random.permutation(len(sizes))[: random.integers(1, 4)]
            if random.random() < 0.6:
                scope = np.array(list(dict.fromkeys([0, *scope]))[:3])  # variable 0 is the mode
            array = random.integers(0, 20, size=tuple(sizes[v] for v in scope)) * unit
            array[random.random(array.shape) < forbid] = np.inf
            made.append(table(tuple(scope.tolist()), array))
        return tuple(made)

    blocks, loads = [], [[] for _ in range(random.integers(1, 4))]
    for number in range(random.integers(1, 4)):
        own, ports = int(random.integers(1, 4)), int(random.integers(0, 3)) if number else 0
        sizes = (2, *random.integers(1, 4, size=own - 1).tolist(), *[2] * ports)
        forbid = 0.05 if random.random() < 0.3 else 0.0
        blocks.append(BlockNetwork(sizes, own, tables(sizes, random.integers(1, 6), SECONDS, forbid)))
        for load in loads:
            load.append(tables(sizes, random.integers(0, 4), BYTES, 0.0))
    copies = [BlockCopy(0, ())]
    for _ in range(random.integers(0, 4)):
        b = int(random.integers(len(blocks)))
        places = [
            (c, v)
            for c, copy in enumerate(copies)
            for v in range(blocks[copy.block].own)
            if blocks[copy.block].sizes[v] == 2
        ]
        ports = len(blocks[b].sizes) - blocks[b].own
        copies.append(BlockCopy(b, tuple(places[i] for i in random.integers(len(places), size=ports))))
    used = sorted({copy.block for copy in copies})
    copies = tuple(BlockCopy(used.index(copy.block), copy.ports) for copy in copies)
    network = Network(tuple(blocks[b] for b in used), copies)
    return network, [limit_between(network, Load(tuple(load[b] for b in used), 0.0), random) for load in loads]


def chain(seed: int) -> tuple[Network, list[Load]]:
    """A chain of copies that pass one of three states on, with choices of their own; all of them read the first
    block, too. To stay in a state is cheap, to leave it is dear: the best mixture may want two that do not meet."""
    random = np.random.default_rng(seed)
    states, modes = 3, int(random.integers(2, 4))
    first = BlockNetwork((states, 2), 2, (table((0,), random.integers(0, 9, states) * SECONDS),))
    leave = np.where(np.eye(states, dtype=bool), 0, random.integers(0, 30, (states, states)))
    tables = (
        table((0, 1), random.integers(0, 9, (states, modes)) * SECONDS),
        table((2, 0), leave * SECONDS),
        table((3, 1), random.integers(0, 9, (2, modes)) * SECONDS),
    )
    layer = BlockNetwork((states, modes, states, 2), 2, tables)
    last = BlockNetwork((2, states), 1, (table((0, 1), random.integers(0, 9, (2, states)) * SECONDS),))
    count = int(random.integers(6, 10))
    copies = (BlockCopy(0, ()), *(BlockCopy(1, ((c, 0), (0, 1))) for c in range(count)), BlockCopy(2, ((count, 0),)))
    network = Network((first, layer, last), copies)
    amounts = [random.integers(0, 20, (states, modes)) * BYTES for _ in range(random.integers(1, 3))]
    return network, [limit_between(network, Load(((), (table((0, 1), a),), ()), 0.0), random) for a in amounts]


@dataclass(frozen=True)
class _Layer:
    """What a copy costs and holds, by its mode and its layout; all of these are over both."""

    cost: np.ndarray
    kept: np.ndarray  # from its forward pass to its turn in the backward pass
    gradient: np.ndarray  # from its turn on
    turn: np.ndarray  # at its turn
    change: np.ndarray  # cost [layout before, layout]


def _layer(random: Random, modes: int, layouts: int) -> _Layer:
    """Modes that keep less cost more; the rest is any."""
    keeps = np.sort(random.integers(0, 12, modes))[::-1][:, None] + random.integers(0, 4, (modes, layouts))
    costs = np.sort(random.integers(0, 12, modes))[:, None] + random.integers(0, 6, (modes, layouts))
    change = np.where(np.eye(layouts, dtype=bool), 0, random.integers(0, 20, (layouts, layouts)))
    gradient = np.broadcast_to(random.integers(0, 6, layouts), (modes, layouts))
    return _Layer(costs * SECONDS, keeps * BYTES, gradient * BYTES, random.integers(0, 15, (modes, layouts)) * BYTES,
                  change * SECONDS)  # fmt: skip


def training(seed: int) -> tuple[Network, list[Load]]:
    """Layers in one chain or in two, of which the second reads the end of the first, too. Their first and last copies
    are blocks of their own, as that is where memory peaks; the loads are the moments of a step: the optimizer's, the
    turns of the ends, and the most demanding copy's next to them."""
    random = np.random.default_rng(seed)
    modes, layouts = int(random.integers(2, 4)), int(random.integers(1, 4))
    blocks: list[BlockNetwork] = []
    kinds: list[_Layer | None] = []  # of each block
    copies: list[BlockCopy] = []

    def add(layer: _Layer, ports: tuple[tuple[int, int], ...], new: bool, memory: np.ndarray | None = None) -> None:
        if new:
            tables = [table((0, 1), layer.cost)] + ([table((2, 1), layer.change)] if ports else [])
            tables += [table((3, 1), memory)] if memory is not None else []
            blocks.append(BlockNetwork((modes, layouts, *[layouts] * len(ports)), 2, tuple(tables)))
            kinds.append(layer)
        copies.append(BlockCopy(len(blocks) - 1, ports))

    add(_layer(random, modes, layouts), (), True)
    families: list[list[int]] = []
    for part in range(int(random.integers(1, 3))):
        layer, count = _layer(random, modes, layouts), int(random.integers(6, 10))
        read, memory = ((len(copies) - 1, 1),) if part else (), random.integers(0, 9, (layouts, layouts)) * SECONDS
        families.append([*range(len(copies), len(copies) + count)])
        for number in range(count):
            new = number in (0, 1, count - 1)
            add(layer, ((len(copies) - 1, 1), *read), new, memory if part else None)
    network = Network(tuple(blocks), tuple(copies))
    loads = [_moment(network, kinds, None)]
    for family in families:
        for end in (family[0], family[-1]):
            loads += [_moment(network, kinds, end), _moment(network, kinds, end, {copies[c].block for c in family})]
    return network, [limit_between(network, load, random) for load in loads]


def _moment(network: Network, kinds: list, turn: int | None, family: set[int] | None = None) -> Load:
    """What is there at the turn of a copy, or of the most demanding one of a family next to it."""
    when = {
        copy.block: c for c, copy in enumerate(network.copies)
    }  # a block's copies are all before the turn, or after
    amounts: list[tuple[Table, ...]] = []
    turns: list[tuple[Table, ...]] = []
    for b, layer in enumerate(kinds):
        if turn is None or when[b] > turn:
            held = layer.gradient
        elif when[b] < turn:
            held = layer.kept
        else:
            held = layer.turn if family is None else layer.kept
        amounts.append((table((0, 1), held),))
        turns.append((table((0, 1), layer.turn),) if family is not None and b in family else ())
    return Load(tuple(amounts), 0.0, tuple(turns) if family is not None else ())


def judged(network: Network, loads: list[Load]) -> SearchProblem:
    """The problem as a planner poses it: the search is told of one load, a referee names the others."""

    def referee(choices: Choices) -> Overrun | None:
        beyond = [(load.amount(network, choices) - load.limit, k) for k, load in enumerate(loads)]
        excess, k = max(beyond)
        return Overrun(excess, loads[k]) if excess > 0.5 * BYTES else None

    return SearchProblem(network, loads[:1], referee)


KINDS: dict[str, Callable[[int], tuple[Network, list[Load]]]] = {
    "any wiring": any_wiring, "chain": chain, "training": training,
}  # fmt: skip
ORDER = ("any wiring", "any wiring", "training", "any wiring", "chain", "any wiring", "training", "chain")


def limited_problem(seed: int) -> tuple[str, Network, list[Load]]:
    kind = ORDER[seed % len(ORDER)]
    return kind, *KINDS[kind](seed)


# -- what comes of them --------------------------------------------------------------------------------


def ways(network: Network, loads: list[Load]) -> dict[str, Callable[[], SearchProblem]]:
    """All that the same problem may be posed as. One that is in a hurry proves little, and nothing that is wrong."""
    return {
        "told": lambda: SearchProblem(network, loads),
        "judged": lambda: judged(network, loads),
        "warm": lambda: warm(network, loads),
        "hurried": lambda: SearchProblem(network, loads, budgets=(6,), work=2_000, solves=2),
    }


def warm(network: Network, loads: list[Load]) -> SearchProblem:
    """The problem with what a search with a looser limit has found out."""
    looser = [replace(load, limit=load.limit + 3 * BYTES) for load in loads[:1]]
    before = solve_within(SearchProblem(network, looser))
    return SearchProblem(network, loads, prices=before.prices, evaluated=before.evaluated)


def verdict(found: SearchResult, network: Network, loads: list[Load], truth: float | None, way: str) -> str:
    """What is wrong is in capitals."""
    answer = found.answer
    if answer is None:
        if found.infeasible:
            return "infeasible" if truth is None else "WRONG PROOF that there is no plan"
        return "nothing, no proof" if truth is None or way == "hurried" else "MISSED a plan"
    if answer.cost != cost_of(network, answer.choices):
        return "WRONG COST"
    if any(load.amount(network, answer.choices) > load.limit + 0.5 * BYTES for load in loads):
        return "BEYOND a limit"
    if truth is None or answer.cost < truth - CLOSE * SECONDS:
        return "ORACLE missed a plan"
    if answer.bound > truth + CLOSE * SECONDS:
        return "WRONG BOUND"
    if answer.cost > truth + CLOSE * SECONDS:
        return "a gap" if answer.gap > 1e-7 * answer.cost else "WRONG PROOF"
    return "proven" if answer.gap <= 1e-7 * answer.cost else "optimal, a gap"


def verdicts(seed: int, thorough: bool = True) -> dict[str, str]:
    """By the way it was posed, with the kind of the problem. Every problem is posed in one way; some, if one wants to
    be thorough, in all."""
    kind, network, loads = limited_problem(seed)
    truth = least_within(network, loads)
    asked, number = ways(network, loads), seed // len(ORDER)
    some = [*asked] if thorough and number % 4 == 0 else [[*asked][number % len(asked)]]
    return {f"{kind}, {way}": verdict(solve_within(asked[way]()), network, loads, truth, way) for way in some}
