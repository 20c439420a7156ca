"""The cheapest plan within limits, by branch and bound over what the most demanding copy adds to them, and over how
many copies make a choice.

At prices only the mean of what copies add at their turns counts. So mixtures in which some copies add much and others
little pass as frugal, though one copy is enough for a plan to need room for it. Plans are of two kinds: some copy adds
so much, and there is room for that; or none does. Then no copy makes a choice that adds as much by itself, and copies
that make the choice to blame add less than that in their mean. Both kinds have better bounds than all plans.

Where copies are few, mixtures in which half a copy makes a choice are another way to look frugal. Plans are of two
kinds here, too: so many copies make the choice at most, or one more at least. The number of copies is an amount like
others, with a limit and a price.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np

from tapas.search.cost_tables import Table, table
from tapas.search.engine import LeastOvershoot, SearchProblem, SearchResult
from tapas.search.lagrangian import LITTLE_WORK, LagrangianSearch
from tapas.search.min_marginals import min_marginals
from tapas.search.mixture_program import ChoiceCount, Goal, TurnDemand, choice_counts, turn_demands
from tapas.search.monitor import Stopped
from tapas.search.multi_objective import Load
from tapas.search.network import BlockNetwork, BlockVariable, Network
from tapas.search.solver import SearchAnswer
from tapas.search.tied import copies_alike

SOLVES = 6  # searches with prices for each load, and for one more
MOST_LOADS = 40  # that a referee may name
NODES = 12  # that are looked at
COUNT_NODES = 16  # more that are, where numbers of copies are branched on
DEPTH = 8  # splits that lead to a plan, if any do
PATIENCE = 3  # splits that may bring nothing
PROGRESS = 0.05  # of the gap: less is nothing
TIGHTER = 1.0, 2.0, 4.0  # times that difference
POOR = 3e-2  # relative: a gap that is worth the time that plans and splits of this kind take
GOOD = 5e-3  # relative: a gap that is no more
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
    counts: tuple[Load, ...]  # of copies that make a choice
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
        self.push(_Node(ranges, (), self.root, self.root.lower_bound, len(self.root.loads)))

    def push(self, *nodes: _Node) -> None:
        for node in nodes:
            self.count += 1
            heapq.heappush(self.nodes, (node.bound, self.count, node))
        self.root.learn_bound(self.lowest.bound)

    @property
    def lowest(self) -> _Node:
        """The node with the lowest bound, which is one of all plans."""
        return self.nodes[0][2]

    @property
    def good(self) -> bool:
        """The best plan is near its bound."""
        return self.root.cost - self.root.bound <= GOOD * abs(self.root.cost)

    def run(self) -> None:
        """Split nodes as long as that helps, then look at what is left more closely; in the end, at all at once."""
        poor = POOR * abs(self.root.cost) < self.root.cost - self.root.bound < np.inf
        thorough = poor and self.root.work >= LITTLE_WORK
        if thorough and not self.good:
            self.glance()
            self.tighten()
        while not self.root.enough and self.count < NODES and (turn := self.widest(self.lowest)) is not None:
            self.push(*self.split(heapq.heappop(self.nodes)[2], *turn))
        if thorough and not self.good:
            self.branch_on_counts()
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
        parts = [
            self.part(node, (*node.ranges[:number], known, *node.ranges[number + 1 :]), node.counts)
            for known in (some, none)
        ]
        helped = min(part.bound for part in parts) - node.bound
        if helped < HELPFUL * (self.root.least_cost - node.bound):
            return [replace(node, futile=node.futile | {number})]
        return parts

    def glance(self) -> None:
        """Small problems need no more than little work."""
        self.root.work, work = LITTLE_WORK, self.root.work
        self.root.close_gap()
        self.root.work += work - LITTLE_WORK

    def tighten(self) -> None:
        """Look for plans whose turns stay below their limits in the mean by as much as the most demanding copy is above
        the mean, or by more."""
        root, count = self.root, len(self.root.loads)
        for times in TIGHTER:
            if self.good or len(root.loads) > count or not root.plans:
                break
            demands = turn_demands(root.objectives, Goal(root.limits, 0.0), root.plans)
            spread = {
                turn.objective - 1: times * max(0.0, demand.most - demand.mean)
                for turn, demand in zip(root.objectives.turns, demands, strict=False)  # no demands: no mixture
            }
            if not any(spread.values()):
                break
            loads = [replace(load, limit=load.limit - spread.get(k, 0.0)) for k, load in enumerate(root.loads)]
            known = tuple(root.plans.values())
            search = LagrangianSearch(replace(root.problem, loads=loads, prices=(), evaluated=known, shown=False))
            if search.begin() is None:
                search.ascend(2 * SOLVES)
                search.mix_plans(search.objectives, search.cheaper_target, search.cheaper_goal)
            for choices in search.plans:
                root.evaluate(choices)
            root.mix_plans(root.objectives, root.cheaper_target, root.cheaper_goal)

    def branch_on_counts(self) -> None:
        """Split by how many copies make a choice: the part with the lower bound again and again, as there a plan is
        found soonest, until there is a good one; then whatever has the lowest, as long as that helps."""
        at, idle = self.nodes[0], 0
        while not self.root.enough and idle < PATIENCE and self.count < NODES + COUNT_NODES:
            fraction = self.fractional(at[2])
            if fraction is None:
                break
            cost, bound = self.root.least_cost, self.lowest.bound
            self.nodes.remove(at)
            heapq.heapify(self.nodes)
            parts = self.split_count(at[2], fraction)
            self.push(*parts)
            gained = cost - self.root.least_cost + self.lowest.bound - bound
            deeper = min((entry for entry in self.nodes if any(entry[2] is part for part in parts)), key=itemgetter(0))
            found = self.root.least_cost < cost
            dive = not found and len(deeper[2].counts) <= DEPTH and deeper[0] < self.root.least_cost
            at = deeper if dive and not self.good else self.nodes[0]
            idle = 0 if at is deeper or gained > PROGRESS * (cost - bound) else idle + 1

    def fractional(self, node: _Node) -> ChoiceCount | None:
        """The choice that most tables look at, of those that no whole number of copies makes in the best mixture."""
        search = node.search
        if node.closed or not search.plans:
            return None
        tables = search.objectives.tables
        return max(
            choice_counts(search.objectives, Goal(search.limits, 0.0), search.plans),
            key=lambda c: (sum(c.variable in scope for scope in tables[c.block]), -abs(c.count % 1 - 0.5)),
            default=None,
        )

    def split_count(self, node: _Node, fraction: ChoiceCount) -> list[_Node]:
        """At most so many copies make the choice, or at least one more."""
        few = int(fraction.count)
        loads = self.count_load(node, fraction, 1.0, few), self.count_load(node, fraction, -1.0, -few - 1)
        return [self.part(node, node.ranges, (*node.counts, load)) for load in loads]

    def count_load(self, node: _Node, fraction: ChoiceCount, sign: float, limit: float) -> Load:
        """The copies that make a choice, as an amount; all blocks that are one to the node's search are."""
        network = self.root.network
        unit = abs(self.root.loads[0].limit) or 1.0  # about as large as other amounts
        merged = node.search.objectives.network.copies
        same = {copy.block for copy, its in zip(network.copies, merged, strict=True) if its.block == fraction.block}
        v, blocks = fraction.variable, list[tuple[Table, ...]]()
        for b, block in enumerate(network.blocks):
            made = np.arange(block.sizes[v]) == fraction.choice if b in same else None
            blocks.append(() if made is None else (table((v,), np.where(made, sign * unit, 0.0)),))
        return Load(tuple(blocks), limit * unit)

    def part(self, node: _Node, ranges: tuple[_TurnRange, ...], counts: tuple[Load, ...]) -> _Node:
        """The plans of a node in which a turn is in a narrower range, or fewer or more copies make a choice."""
        root = self.root
        loads = [*root.loads, *counts]
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
            if counts and search.lower_bound < root.least_cost:
                search.mix_plans(search.objectives, search.cheaper_target, search.cheaper_goal)
            bound = search.lower_bound
        elif done.answer is None:
            bound = np.inf if done.infeasible else node.bound
        else:
            bound = done.answer.bound
        part = _Node(ranges, counts, search, max(bound, node.bound), len(loads), node.futile, done is not None)
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
