"""The cheapest plan within limits, by branch and bound over what the most demanding copy adds to them.

At prices only the mean of what copies add at their turns counts. So mixtures in which some copies add much and others
little pass as frugal, though one copy is enough for a plan to need room for it. Plans are of two kinds: some copy adds
so much, and there is room for that; or none does. Then no copy makes a choice that adds as much by itself, and copies
that make the choice to blame add less than that in their mean. Both kinds have better bounds than all plans.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np

from tapas.search.cost_tables import Table, table
from tapas.search.engine import LeastOvershoot, SearchProblem, SearchResult
from tapas.search.lagrangian import LagrangianSearch
from tapas.search.min_marginals import min_marginals
from tapas.search.mixture_program import Goal, TurnDemand, turn_demands
from tapas.search.monitor import Stopped
from tapas.search.multi_objective import Load
from tapas.search.network import BlockNetwork, BlockVariable, Network
from tapas.search.solver import SearchAnswer
from tapas.search.tied import copies_alike

SOLVES = 6  # searches with prices for each load, and for one more
MOST_LOADS = 40  # that a referee may name
NODES = 12  # that are looked at
LITTLE = 1e-3  # of a limit: what turns may differ by, and be alike
HELPFUL = 0.1  # of the gap: a split that closes less is for nothing
SMALL = 0.01  # of what turns come to: tables that hardly matter
LARGE = 20_000  # entries of a table


def solve_within(problem: SearchProblem) -> SearchResult:
    """The engine: the cheapest plan whose amounts are within the limits.

    >>> from tapas.search import BlockCopy, BlockNetwork, Load, table
    >>> block = BlockNetwork((2,), 1, (table((0,), np.array([1.0, 3.0])),))  # cheap and large, or dear and small
    >>> memory = Load(((table((0,), np.array([2.0, 1.0])),),), limit=3.0)
    >>> solve_within(SearchProblem(Network((block,), [BlockCopy(0, ())] * 2), [memory])).answer
    SearchAnswer(choices=((0,), (1,)), cost=4.0, bound=4.0, alike=False)
    """
    search = LagrangianSearch(problem)
    try:
        done = search.begin()
        known = 0
        while done is None and known < len(search.loads) <= MOST_LOADS:
            known = len(search.loads)
            search.approach(SOLVES * (1 + known) if problem.solves is None else problem.solves)
            if known == len(search.loads):
                tree = _BranchAndBound(search)
                tree.run()
                if tree.count > 1 and search.enough:  # with the loads that nodes have named, too
                    break
    except Stopped:
        done = None
    return replace(done or _result(search), log=tuple(search.log.entries))


def _result(search: LagrangianSearch) -> SearchResult:
    if not (search.plans and search.loads):  # it was stopped before anything was found, or is for the referee to say
        return SearchResult(None, prices=(0.0,) * len(search.loads), evaluated=tuple(search.plans.values()))
    units = np.array(search.objectives.units)
    prices = tuple((search.prices * units[0] / units[1:]).tolist())
    evaluated, best = tuple(search.plans.values()), search.best
    if best is not None:
        bound = best.cost if search.proven else min(search.bound * units[0], best.cost)
        answer = SearchAnswer(best.choices, best.cost, float(bound), copies_alike(search.network, best.choices))
        return SearchResult(answer, best.amounts, prices, evaluated)
    limits = np.array([load.limit for load in search.loads])
    overshoots = [float((np.array(plan.amounts) - limits).max()) for plan in evaluated]
    closest = int(np.argmin(overshoots))
    bound = min(search.least * float(units[1:].max()), overshoots[closest])
    least = LeastOvershoot(evaluated[closest], overshoots[closest], float(bound))
    return SearchResult(None, None, prices, evaluated, least, search.least > 0.0)


@dataclass(frozen=True)
class _Turn:
    """What the most demanding copy adds to some loads: the same to each of them."""

    loads: tuple[int, ...]  # their numbers
    tables: tuple[tuple[Table, ...], ...]  # per block
    least: Mapping[BlockVariable, np.ndarray]  # that a copy adds which makes a choice

    def to_blame(self, block: int, choices: Sequence[int]) -> tuple[int, int]:
        """The variable and the choice that say most about what a copy adds."""
        return max(enumerate(choices), key=lambda made: float(self.least[block, made[0]][made[1]]))


@dataclass(frozen=True)
class _TurnRange:
    """Between what the most demanding copy adds."""

    least: float = 0.0
    below: float = np.inf
    blamed: tuple[tuple[int, int], ...] = ()  # choices of some that add more


@dataclass(frozen=True)
class _Node:
    """Plans of one kind."""

    ranges: tuple[_TurnRange, ...]  # by turn
    search: LagrangianSearch
    bound: float
    loads: int  # that the search began with
    futile: frozenset[int] = frozenset()  # turns that it does not help to narrow
    closed: bool = False  # all of it has been looked at, as closely as work allowed


@dataclass
class _BranchAndBound:
    root: LagrangianSearch
    turns: list[_Turn] = field(init=False)
    nodes: list[tuple[float, int, _Node]] = field(default_factory=list[tuple[float, int, _Node]])  # a heap, by bounds
    count: int = 0

    def __post_init__(self) -> None:
        self.turns = [*_turns_of(self.root.network, self.root.loads)] if self.root.problem.work else []
        ranges = (_TurnRange(),) * len(self.turns)
        self.push(_Node(ranges, self.root, self.root.lower_bound, len(self.root.loads)))

    def push(self, *nodes: _Node) -> None:
        for node in nodes:
            self.count += 1
            heapq.heappush(self.nodes, (node.bound, self.count, node))
        self.root.learn_bound(self.lowest.bound)

    @property
    def lowest(self) -> _Node:
        """The node with the lowest bound, which is one of all plans."""
        return self.nodes[0][2]

    def run(self) -> None:
        """Split nodes as long as that helps, then look at what is left more closely; in the end, at all at once."""
        while not self.root.enough and self.count < NODES and (turn := self.widest(self.lowest)) is not None:
            self.push(*self.split(heapq.heappop(self.nodes)[2], *turn))
        while not self.root.proven and not self.lowest.closed:
            self.push(self.close(heapq.heappop(self.nodes)[2]))
        if self.count > 2 and not self.root.enough:
            self.root.close_gap()

    def widest(self, node: _Node) -> tuple[int, TurnDemand] | None:
        """The turn whose mean differs most, by what that costs, from what the most demanding copy adds."""
        search, found = node.search, list[tuple[float, int, TurnDemand]]()
        if not self.turns or not search.plans or not search.prices.any():
            return None
        demands = turn_demands(search.objectives, Goal(search.limits, 0.0), search.plans)
        if not demands:
            return None
        of_load = {turn.objective - 1: demand for turn, demand in zip(search.objectives.turns, demands, strict=True)}
        for number, turn in enumerate(self.turns):
            for k in turn.loads if number not in node.futile else ():
                if k in of_load:
                    demand, limit = of_load[k], abs(self.root.loads[k].limit)
                    spread = min(demand.most, node.ranges[number].below) - max(demand.mean, node.ranges[number].least)
                    if spread > LITTLE * limit:
                        found.append(
                            (float(search.prices[k]) * spread / search.objectives.units[1 + k], number, demand)
                        )
        return max(found, key=itemgetter(0))[1:] if found else None

    def split(self, node: _Node, number: int, demand: TurnDemand) -> list[_Node]:
        """In the middle between mean and most; or not at all, if that does not help."""
        turn, known = self.turns[number], node.ranges[number]
        block = self.root.network.copies[demand.copy].block
        middle = (max(demand.mean, known.least) + min(demand.most, known.below)) / 2
        blamed = tuple(dict.fromkeys((*known.blamed, turn.to_blame(block, demand.choices))))
        some, none = replace(known, least=middle), replace(known, below=middle, blamed=blamed)
        parts = [self.part(node, number, some), self.part(node, number, none)]
        helped = min(part.bound for part in parts) - node.bound
        if helped < HELPFUL * (self.root.least_cost - node.bound):
            return [replace(node, futile=node.futile | {number})]
        return parts

    def part(self, node: _Node, number: int, known: _TurnRange) -> _Node:
        """The plans of a node in which a turn is in a narrower range."""
        root, ranges = self.root, (*node.ranges[:number], known, *node.ranges[number + 1 :])
        loads = [*root.loads]
        for turn, now in zip(self.turns, ranges, strict=True):
            if now.least > 0:
                kin = [root.loads[k] for k in turn.loads]
                loads += [replace(load, limit=load.limit - now.least, turns=()) for load in kin]
            loads += [_mean_below(turn, v, i, now.below) for v, i in now.blamed if now.below < np.inf]
        evaluated = tuple(node.search.plans.values())
        problem = replace(
            root.problem, network=self.without(ranges), loads=loads, prices=(), evaluated=evaluated, shown=False
        )
        search = LagrangianSearch(problem, root.least_cost)
        done = search.begin()
        if done is None:
            search.ascend(2 * SOLVES)
            bound = search.lower_bound
        elif done.answer is None:
            bound = np.inf if done.infeasible else node.bound
        else:
            bound = done.answer.bound
        part = _Node(ranges, search, max(bound, node.bound), len(loads), node.futile, done is not None)
        self.adopt(part)
        return part

    def close(self, node: _Node) -> _Node:
        search = node.search
        search.work, search.ceiling = self.root.work, min(search.ceiling, self.root.least_cost)
        search.close_gap()
        self.root.work = search.work
        self.adopt(node)
        return replace(node, bound=max(node.bound, search.lower_bound), loads=len(search.loads), closed=True)

    def adopt(self, node: _Node) -> None:
        """The plans that a node has come across are the root's, too, and so are the loads that were named for them."""
        if node.search is self.root:
            return
        for load in node.search.loads[node.loads :]:
            self.root.add_load(load)
        for choices, accepted in node.search.verdicts.items():
            if accepted:
                self.root.evaluate(choices)

    def without(self, ranges: Sequence[_TurnRange]) -> Network:
        """The network without the choices that add too much, whatever is around them."""
        network, walls = self.root.network, dict[int, list[Table]]()
        for turn, now in zip(self.turns, ranges, strict=True):
            for (b, v), least in turn.least.items():
                if (least >= now.below).any():
                    walls.setdefault(b, []).append(table((v,), np.where(least >= now.below, np.inf, 0.0)))
        blocks = [
            BlockNetwork(block.sizes, block.own, (*block.tables, *walls.get(b, ())))
            for b, block in enumerate(network.blocks)
        ]
        return Network(tuple(blocks), network.copies)


def _mean_below(turn: _Turn, v: int, i: int, below: float) -> Load:
    """Copies that make a choice add less than so much, in their mean. Of small tables, and of those that would get
    too large, the least counts."""
    blocks: list[tuple[Table, ...]] = []
    for b, tables in enumerate(turn.tables):
        size = len(turn.least.get((b, v), ()))
        if i >= size:
            blocks.append(())
            continue
        mine, least, made = list[Table](), -below, np.eye(size)[i]
        for t in tables:
            if v in t.scope:
                mine.append(table(t.scope, t.array * made.reshape([-1 if u == v else 1 for u in t.scope])))
            elif np.ptp(t.array) < SMALL * below or t.array.size * size > LARGE:
                least += float(t.array.min())
            else:
                mine.append(table((v, *t.scope), np.multiply.outer(made, t.array)))
        blocks.append((*mine, table((v,), least * made)))
    return Load(tuple(blocks), 0.0)


def _turns_of(network: Network, loads: Sequence[Load]) -> Iterator[_Turn]:
    alike: list[list[int]] = []
    for k, load in enumerate(loads):
        if load.turns:
            same = next((ks for ks in alike if _equal_turns(loads[ks[0]], load)), None)
            alike.append([k]) if same is None else same.append(k)
    for ks in alike:
        least: dict[BlockVariable, np.ndarray] = {}
        for b, tables in enumerate(loads[ks[0]].turns):
            if tables:
                block = network.blocks[b]
                marginals = min_marginals(tables, dict(enumerate(block.sizes)))
                least |= {(b, v): marginals[v] for v in range(block.own)}
        yield _Turn(tuple(ks), loads[ks[0]].turns, least)


def _equal_turns(one: Load, other: Load) -> bool:
    pairs = zip(one.turns, other.turns, strict=True)
    return len(one.turns) == len(other.turns) and all(
        len(some) == len(others)
        and all(a.scope == b.scope and np.array_equal(a.array, b.array) for a, b in zip(some, others, strict=True))
        for some, others in pairs
    )
