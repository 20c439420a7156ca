"""The best mixture of what blocks may do, within limits: an integer program of how many copies do what.

Copies in a chain are counted, not told apart: a plan for them is a path through the choices at their borders, and
how often each transition is taken says all there is to it. Whether the transitions form one path is looked at
afterwards: where some of them are not connected to the rest, the program is told that they have to, and solved again.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapas.search.chains import CopyVariable
from tapas.search.eulerian_path import Transition, eulerian_path, unreached_states
from tapas.search.frontier_messages import FrontierIndex, FrontierMessages
from tapas.search.integer_program import IntegerProgram, IntegerSolution, RelaxedSolution
from tapas.search.multi_objective import LinearCut, MultiObjectiveNetwork
from tapas.search.pareto_front import ParetoFront, PointFilter, block_front, front_of_rows
from tapas.search.rows import KnownRows, known_rows
from tapas.search.run_length import Choices
from tapas.search.topology import topology_of

REPAIRS = 24  # of transitions that are not connected, or turns that have no room
COLUMNS = 600
ITERATION = 5  # points that are compared while the simplex algorithm makes a step
USED = 1e-6  # of a copy: more than nothing
FRACTION = 1e-3  # of a copy
ROUNDING = 1e-9  # of amounts, which are about one


@dataclass(frozen=True)
class Goal:
    """What is wanted of the sums of all objectives: the least first one, with the others within their limits; or, with
    scales, the least overshoot of any of them."""

    limits: np.ndarray
    tolerance: float
    scales: np.ndarray | None = None
    ceiling: float = np.inf  # plans that cost more are of no interest
    columns: int = COLUMNS  # of the program: what promises least is left out


@dataclass(frozen=True)
class Mixture:
    choices: Choices | None  # None: nothing within the cuts was found
    bound: float  # of the goal, for all plans that were looked at
    dropped: float = np.inf  # what was not looked at, for want of room, is above some value cut by at least this
    work: int = 0  # points compared, or what takes as long


def mixture_within_cuts(
    objectives: MultiObjectiveNetwork, cuts: Sequence[LinearCut], goal: Goal, work: float
) -> Mixture:
    """The best plan within all cuts. `work` is how many points may be compared."""
    index = FrontierIndex(objectives.network)
    points_filter = PointFilter([replace(cut, weights=tuple(objectives.columns(cut.weights))) for cut in cuts])
    messages = [FrontierMessages(index, objectives.weighted(cut.weights)) for cut in cuts]
    if any(m.lower_bound > cut.most for m, cut in zip(messages, cuts, strict=True)):
        return Mixture(None, np.inf)
    blocks = range(len(objectives.network.blocks))
    fronts = [block_front(objectives, b, index, messages, points_filter, work) for b in blocks]
    mixture = _best_mixture(index, objectives, fronts, goal)
    return replace(mixture, dropped=points_filter.dropped, work=mixture.work + points_filter.work)


def mixture_of_rows(objectives: MultiObjectiveNetwork, goal: Goal, rows: Sequence[np.ndarray]) -> Mixture:
    """The best plan in which blocks choose only as one of their rows, [row, own variable], says."""
    index = FrontierIndex(objectives.network)
    fronts = [front_of_rows(objectives, b, index, own) for b, own in enumerate(rows)]
    return _best_mixture(index, objectives, fronts, goal)


def relaxed_mixture(objectives: MultiObjectiveNetwork, goal: Goal, plans: Iterable[Choices]) -> RelaxedSolution | None:
    """The best mixture of what blocks do in some plans, if parts of a copy could do differently. Its prices are those
    at which a search finds what is missing (column generation)."""
    mixing, _ = _mixing_of_plans(objectives, plans)
    first = mixing.pose(goal)
    relaxed = mixing.program.relax()
    return relaxed and replace(relaxed, cost=relaxed.cost + first)


@dataclass(frozen=True)
class TurnDemand:
    """What copies add to a load at their turns."""

    mean: float
    most: float
    copy: int  # one that is most demanding
    choices: tuple[int, ...]  # of such a copy


def turn_demands(objectives: MultiObjectiveNetwork, goal: Goal, plans: Iterable[Choices]) -> list[TurnDemand]:
    """Those of the same mixture, by turn column; none if there is no mixture."""
    mixing, known = _mixing_of_plans(objectives, plans)
    mixing.pose(goal)
    relaxed = mixing.program.relax()
    if relaxed is None:
        return []
    values, demands = relaxed.values[: len(mixing.sums)], list[TurnDemand]()
    for t, turn in enumerate(objectives.turns, len(objectives.units)):
        amounts = mixing.sums[:, t] * objectives.units[turn.objective]
        used = np.where(values > USED, amounts, 0.0)
        column = int(np.argmax(used))
        group = next(g for g in mixing.groups if g.column <= column < g.column + len(g.points))
        block = objectives.network.copies[group.first].block
        own = mixing.fronts[block].choices[group.points[column - group.column]].tolist()
        choices = tuple([int(known.domains[block, v][i]) for v, i in enumerate(own)])
        demands.append(TurnDemand(float(amounts @ values) / turn.copies, float(used[column]), group.first, choices))
    return demands


@dataclass(frozen=True)
class ChoiceCount:
    """How many copies of a block make a choice."""

    block: int
    variable: int
    choice: int
    count: float


def choice_counts(objectives: MultiObjectiveNetwork, goal: Goal, plans: Iterable[Choices]) -> list[ChoiceCount]:
    """Those of the same mixture that are no whole numbers."""
    mixing, known = _mixing_of_plans(objectives, plans)
    mixing.pose(goal)
    relaxed = mixing.program.relax()
    if relaxed is None:
        return []
    counts: dict[tuple[int, int, int], float] = defaultdict(float)
    for group in mixing.groups:
        block = objectives.network.copies[group.first].block
        for column, point in zip(group.columns, group.points, strict=True):
            times = float(relaxed.values[column])
            for v, i in enumerate(mixing.fronts[block].choices[point].tolist() if times > USED else ()):
                counts[block, v, int(known.domains[block, v][i])] += times
    return [ChoiceCount(*key, count) for key, count in counts.items() if abs(count - round(count)) > FRACTION]


def _mixing_of_plans(
    objectives: MultiObjectiveNetwork, plans: Iterable[Choices]
) -> tuple["_MixtureProgram", KnownRows]:
    known = known_rows(objectives.network, plans)
    left = objectives.restricted(known.domains)
    index = FrontierIndex(left.network)
    fronts = [front_of_rows(left, b, index, own) for b, own in enumerate(known.rows)]
    return _MixtureProgram(index, left, fronts), known


def _best_mixture(
    index: FrontierIndex, objectives: MultiObjectiveNetwork, fronts: Sequence[ParetoFront], goal: Goal
) -> Mixture:
    """The best plan in which each copy does as one of the points of its block, and a bound for all of these."""
    mixing = _MixtureProgram(index, objectives, fronts)
    if any(not len(group.points) for group in mixing.groups):
        return Mixture(None, np.inf)
    first, bound, others = mixing.pose(goal), -np.inf, np.inf
    if goal.ceiling < np.inf:
        others = first + mixing.program.forbid_beyond(goal.ceiling - first, goal.columns)
    choices, work = None, 0
    for _ in range(REPAIRS):
        solution = mixing.program.solve(goal.tolerance)
        work += ITERATION * solution.iterations
        bound = min(solution.bound + first, others)
        if solution.values is None:
            break
        apart = mixing.disconnected(solution.values)
        if apart is not None:
            mixing.connect(*apart)
            continue
        choices = mixing.choices(solution.values)  # a plan, even if it has to be told what its turns need
        if not mixing.limit_turns(goal, solution):
            break
    return Mixture(choices, bound, work=work)


@dataclass(frozen=True)
class _CopyGroup:
    """Copies that are counted together (a single one as well), and the columns of the program that count them."""

    first: int
    count: int
    points: np.ndarray  # numbers of the points of their block
    column: int  # of the first point
    states: tuple[np.ndarray, np.ndarray] | None = None  # of a chain: before and after each point
    start: int = 0  # the column that says whether state 0 is where a chain starts

    @property
    def columns(self) -> np.ndarray:
        return self.column + np.arange(len(self.points))


class _MixtureProgram:
    def __init__(self, index: FrontierIndex, objectives: MultiObjectiveNetwork, fronts: Sequence[ParetoFront]) -> None:
        network = index.network
        self.network, self.objectives, self.fronts = network, objectives, fronts
        self.boundaries = [index.boundary(b) for b in range(len(fronts))]  # the variables of points' keys
        self.program = IntegerProgram()
        self.choice_columns: dict[CopyVariable, dict[int, int]] = {}  # of what is read: choice -> column that says so
        self.read = {place for copy in network.copies for place in copy.ports}
        self.groups: list[_CopyGroup] = []
        sums: list[tuple[int, np.ndarray]] = []
        self.base = np.zeros(fronts[0].points.sums.shape[1])  # what all plans have; sums are what they have besides
        inner = {chain.first + 1: chain for chain in topology_of(network.copies).chains}
        c = 0
        while c < len(network.copies):
            chain = inner.get(c)
            group = self.add_copy(c) if chain is None else self.add_chain(c, chain.length - 2, chain.feeds)
            self.groups.append(group)
            rows = fronts[network.copies[c].block].points.sums[group.points]
            least = rows.min(0) if len(rows) else np.zeros(len(self.base))
            least[len(objectives.units) :] = 0.0  # turns do not add up
            sums.append((group.column, rows - least))
            self.base += group.count * least
            c += group.count
        self.sums = np.zeros((self.program.columns, len(self.base)))  # [column of the program, column of points]
        for column, rows in sums:
            self.sums[column : column + len(rows)] = rows

    def pose(self, goal: Goal) -> float:
        """What is wanted, with the mean of turns for the most demanding one. Returns what all plans have of it."""
        count = len(self.objectives.units)
        mean = self.sums @ np.array([self.objectives.columns(row) for row in np.eye(count).tolist()]).T
        if goal.scales is None:
            self.program.minimize_cost(mean[:, 0])
            self.program.limit_amounts(mean[:, 1:], goal.limits - self.base[1:count])
            return float(self.base[0])
        self.program.minimize_excess(mean * goal.scales, (goal.limits - self.base[:count]) * goal.scales)
        return 0.0

    def limit_turns(self, goal: Goal, solution: IntegerSolution) -> bool:
        """Whether the most demanding of some copies is beyond a limit; if so, the program is told that none like it
        may be taken unless there is room for it."""
        assert solution.values is not None
        values, beyond = solution.values[: len(self.sums)], False
        for turn, amounts in zip(self.objectives.turns, self.sums.T[len(self.objectives.units) :], strict=True):
            number = turn.objective - (goal.scales is None)  # of its limit: the cost has none
            scale = 1.0 if goal.scales is None else float(goal.scales[number])
            most, base = float(amounts[values > 0].max(initial=0.0)), self.sums[:, turn.objective]
            room = float(goal.limits[number] - self.base[turn.objective])
            excess = 0.0 if goal.scales is None else max(0.0, solution.excess)  # within all limits is good enough
            if (base @ values + most - room) * scale <= excess + ROUNDING:
                continue
            taken, beyond = self.program.add_columns(1, 1), True
            most = float(amounts[amounts > room - base @ values + excess / scale].min())  # all that have no room now
            some = np.flatnonzero(amounts >= most)
            weights = np.append(np.ones(len(some)), -float(turn.copies))
            self.program.add_row(np.append(some, taken), weights, -np.inf, 0.0)
            with_turn = np.zeros(self.program.columns)
            with_turn[: len(base)], with_turn[taken] = base * scale, most * scale
            self.program.limit_amount(with_turn, room * scale)
        return beyond

    def boundary_choices(self, c: int) -> dict[int, np.ndarray]:
        """The choices of the variables at the boundary of a copy, at each point of its block."""
        b = self.network.copies[c].block
        return dict(zip(self.boundaries[b], self.fronts[b].points.keys.T, strict=True))

    def add_copy(self, c: int) -> _CopyGroup:
        copy, keys = self.network.copies[c], self.boundary_choices(c)
        own = self.network.blocks[copy.block].own
        ports = {own + i: place for i, place in enumerate(copy.ports)}
        group = self.add_counts(c, 1, ports)
        for v, key in keys.items():
            if v < own and (c, v) in self.read:
                self.export_choice((c, v), key[group.points], group.columns)
        return group

    def add_counts(self, c: int, count: int, ports: dict[int, CopyVariable]) -> _CopyGroup:
        """Columns for so many copies that all read the same of others, through these ports."""
        keys = self.boundary_choices(c)
        points = np.flatnonzero(np.isfinite(self.fronts[self.network.copies[c].block].points.sums).all(1))
        for v, place in ports.items():
            points = points[np.isin(keys[v][points], [*self.choice_columns[place]])]
        group = _CopyGroup(c, count, points, self.program.add_columns(len(points), count))
        self.program.add_row(group.columns, np.ones(len(points)), count, count)
        for v, place in ports.items():
            self.link(group.columns, keys[v][points], self.choice_columns[place], count)
        return group

    def export_choice(self, place: CopyVariable, values: np.ndarray, columns: np.ndarray) -> None:
        """A choice that others read: exactly one of `columns`, which stand for these values, is taken."""
        domain = np.unique(values).tolist()
        first = self.program.add_columns(len(domain), 1)
        self.choice_columns[place] = {value: first + i for i, value in enumerate(domain)}
        self.link(columns, values, self.choice_columns[place], 1)

    def link(self, columns: np.ndarray, values: np.ndarray, choice_columns: dict[int, int], times: int) -> None:
        """As many of the columns that stand for a value are taken as its own column says: all, or none."""
        for value, column in choice_columns.items():
            some = columns[values == value]
            self.program.add_row([*some, column], [1.0] * len(some) + [-float(times)], 0.0, 0.0)

    def add_chain(self, c: int, count: int, feeds: Sequence[int | None]) -> _CopyGroup:
        copy, keys = self.network.copies[c], self.boundary_choices(c)
        own = self.network.blocks[copy.block].own
        group = self.add_counts(c, count, {own + i: copy.ports[i] for i, v in enumerate(feeds) if v is None})
        fed = sorted({v for v in feeds if v is not None})
        port = {v: own + i for i, v in enumerate(feeds) if v is not None}
        for i, v in enumerate(feeds):  # a variable that is read through two ports
            if v is not None and port[v] != own + i:
                odd = keys[own + i][group.points] != keys[port[v]][group.points]
                self.program.forbid(group.columns[odd])
        before = np.stack([keys[port[v]][group.points] for v in fed], axis=1)
        after = np.stack([keys[v][group.points] for v in fed], axis=1)
        states, numbers = np.unique(np.concatenate([before, after]), axis=0, return_inverse=True)
        numbers = numbers.reshape(-1)
        came, went = numbers[: len(before)], numbers[len(before) :]
        start, end = self.program.add_columns(len(states), 1), self.program.add_columns(len(states), 1)
        every = np.arange(len(states))
        self.program.add_row(start + every, np.ones(len(states)), 1, 1)
        for s in range(len(states)):  # as many copies leave a choice as come to it, but for the first and the last
            loops = came == went
            leaving, coming = group.columns[(came == s) & ~loops], group.columns[(went == s) & ~loops]
            signs = [1.0] * len(leaving) + [-1.0] * len(coming) + [-1.0, 1.0]
            self.program.add_row([*leaving, *coming, start + s, end + s], signs, 0.0, 0.0)
        for i, v in enumerate(fed):
            columns = self.choice_columns[c - 1, v]
            self.program.forbid((start + every)[~np.isin(states[:, i], [*columns])])
            self.link(start + every, states[:, i], columns, 1)
            self.export_choice((c + count - 1, v), states[:, i], end + every)
        return _CopyGroup(c, count, group.points, group.column, (came, went), start)

    # -- from counts to copies ---------------------------------------------------------------------

    def transitions(self, group: _CopyGroup, values: np.ndarray) -> tuple[int, list[Transition]]:
        """Where a chain starts, and what is taken."""
        assert group.states is not None
        counts = values[group.columns]
        taken = np.flatnonzero(counts).tolist()
        before, after = group.states
        transitions = [Transition(int(before[i]), int(after[i]), i, int(counts[i])) for i in taken]
        count = int(max(before.max(), after.max())) + 1
        return int(np.argmax(values[group.start : group.start + count])), transitions

    def disconnected(self, values: np.ndarray) -> tuple[_CopyGroup, set[int]] | None:
        """A chain with states that its transitions leave, but do not get to."""
        for group in self.groups:
            if group.states is not None:
                states = unreached_states(*self.transitions(group, values))
                if states:
                    return group, states
        return None

    def connect(self, group: _CopyGroup, states: set[int]) -> None:
        """Whatever is done at these states, they have to be come to, or be where the chain starts."""
        assert group.states is not None
        came, went = (np.isin(side, [*states]) for side in group.states)
        inside, into = group.columns[came], group.columns[went & ~came]
        starts = [group.start + s for s in states]
        signs = [-1.0] * len(inside) + [float(group.count)] * (len(into) + len(starts))
        self.program.add_row([*inside, *into, *starts], signs, 0.0, np.inf)

    def choices(self, values: np.ndarray) -> Choices:
        choices: list[tuple[int, ...]] = []
        shared: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal choices as one object: looked up by identity
        for group in self.groups:
            b = self.network.copies[group.first].block
            if group.states is None:
                taken = [int(np.argmax(values[group.columns]))]
            else:
                taken = eulerian_path(*self.transitions(group, values))
            rows = {i: tuple(self.fronts[b].choices[group.points[i]].tolist()) for i in set(taken)}
            choices += [shared.setdefault(rows[i], rows[i]) for i in taken]
        return tuple(choices)
