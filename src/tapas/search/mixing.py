"""The best mixture of what blocks may do, within limits: an integer program of how many copies do what.

Copies in a chain are counted, not told apart: a plan for them is a walk through the choices at their borders, and
how often each step is taken says all there is to it. Whether the steps form one walk is looked at afterwards: where
some of them do not hang together with the rest, the program is told that they have to, and solved again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapas.search.fronts import Fronts
from tapas.search.measures import MultiObjectiveNetwork
from tapas.search.network import Choices, Network, Place
from tapas.search.program import Program
from tapas.search.walks import Step, unreached, walk
from tapas.search.wiring import topology_of

REPAIRS = 20  # of walks that do not hang together


@dataclass(frozen=True)
class Goal:
    """What is wanted of the sums of all measures: the least first one, with the others within their limits; or, with
    scales, the least overshoot of any of them."""

    limits: np.ndarray
    near: float  # so little does not matter
    scales: np.ndarray | None = None


@dataclass(frozen=True)
class Mixture:
    choices: Choices | None  # None: there is none
    bound: float  # no mixture comes to less


def mixed(
    part: MultiObjectiveNetwork, fronts: Sequence[Fronts], outward: Sequence[Sequence[int]], goal: Goal
) -> Mixture:
    """The best plan in which each copy does as one of the points of its block. `outward` says which variables of
    a block the columns of its points' keys are."""
    mixing = _Mixing(part.network, fronts, outward)
    if any(not len(part.points) for part in mixing.parts):
        return Mixture(None, np.inf)
    program, base, first = mixing.program, mixing.base, 0.0
    if goal.scales is None:
        program.least(mixing.sums[:, 0])
        program.within(mixing.sums[:, 1:], goal.limits - base[1:])
        first = float(base[0])
    else:
        program.least_excess(mixing.sums * goal.scales, (goal.limits - base) * goal.scales)
    for _ in range(REPAIRS):
        found = program.solved(goal.near)
        if found.values is None:
            break
        apart = mixing.apart(found.values)
        if apart is None:
            return Mixture(mixing.choices(found.values), found.bound + first)
        mixing.join(*apart)
    return Mixture(None, found.bound + first)


@dataclass(frozen=True)
class _Part:
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


class _Mixing:
    def __init__(self, network: Network, fronts: Sequence[Fronts], outward: Sequence[Sequence[int]]) -> None:
        self.network, self.fronts, self.outward = network, fronts, outward
        self.program = Program()
        self.wires: dict[Place, dict[int, int]] = {}  # what is read elsewhere: choice -> the column that says so
        self.read = {place for copy in network.copies for place in copy.ports}
        self.parts: list[_Part] = []
        sums: list[tuple[int, np.ndarray]] = []
        self.base = np.zeros(fronts[0].points.sums.shape[1])  # what all plans have; sums are what they have besides
        inner = {chain.first + 1: chain for chain in topology_of(network.copies).chains}
        c = 0
        while c < len(network.copies):
            chain = inner.get(c)
            part = self.single(c) if chain is None else self.chain(c, chain.length - 2, chain.feeds)
            self.parts.append(part)
            rows = fronts[network.copies[c].block].points.sums[part.points]
            least = rows.min(0) if len(rows) else np.zeros(len(self.base))
            sums.append((part.column, rows - least))
            self.base += part.count * least
            c += part.count
        self.sums = np.zeros((self.program.columns, len(self.base)))  # [column, measure]
        for column, rows in sums:
            self.sums[column : column + len(rows)] = rows

    def keys(self, c: int) -> dict[int, np.ndarray]:
        """The choices of the variables around a copy, at each point of its block."""
        b = self.network.copies[c].block
        return dict(zip(self.outward[b], self.fronts[b].points.keys.T, strict=True))

    def single(self, c: int) -> _Part:
        copy, keys = self.network.copies[c], self.keys(c)
        own = self.network.blocks[copy.block].own
        ports = {own + i: place for i, place in enumerate(copy.ports)}
        part = self.counted(c, 1, ports)
        for v, key in keys.items():
            if v < own and (c, v) in self.read:
                self.made((c, v), key[part.points], part.columns)
        return part

    def counted(self, c: int, count: int, ports: dict[int, Place]) -> _Part:
        """Columns for so many copies that all read the same of others, through these ports."""
        keys = self.keys(c)
        points = np.flatnonzero(np.isfinite(self.fronts[self.network.copies[c].block].points.sums).all(1))
        for v, place in ports.items():
            points = points[np.isin(keys[v][points], [*self.wires[place]])]
        part = _Part(c, count, points, self.program.add(len(points), count))
        self.program.row(part.columns, np.ones(len(points)), count, count)
        for v, place in ports.items():
            self.linked(part.columns, keys[v][points], self.wires[place], count)
        return part

    def made(self, place: Place, values: np.ndarray, columns: np.ndarray) -> None:
        """A choice that others read: exactly one of `columns`, which stand for these values, is taken."""
        domain = np.unique(values).tolist()
        first = self.program.add(len(domain), 1)
        self.wires[place] = {value: first + i for i, value in enumerate(domain)}
        self.linked(columns, values, self.wires[place], 1)

    def linked(self, columns: np.ndarray, values: np.ndarray, wire: dict[int, int], times: int) -> None:
        """As many of the columns that stand for a value are taken as the wire says: all, or none."""
        for value, column in wire.items():
            some = columns[values == value]
            self.program.row([*some, column], [1.0] * len(some) + [-float(times)], 0.0, 0.0)

    def chain(self, c: int, count: int, feeds: Sequence[int | None]) -> _Part:
        copy, keys = self.network.copies[c], self.keys(c)
        own = self.network.blocks[copy.block].own
        part = self.counted(c, count, {own + i: copy.ports[i] for i, v in enumerate(feeds) if v is None})
        fed = sorted({v for v in feeds if v is not None})
        port = {v: own + i for i, v in enumerate(feeds) if v is not None}
        for i, v in enumerate(feeds):  # a variable that is read through two ports
            if v is not None and port[v] != own + i:
                odd = keys[own + i][part.points] != keys[port[v]][part.points]
                self.program.forbid(part.columns[odd])
        before = np.stack([keys[port[v]][part.points] for v in fed], axis=1)
        after = np.stack([keys[v][part.points] for v in fed], axis=1)
        states, numbers = np.unique(np.concatenate([before, after]), axis=0, return_inverse=True)
        numbers = numbers.reshape(-1)
        came, went = numbers[: len(before)], numbers[len(before) :]
        start, end = self.program.add(len(states), 1), self.program.add(len(states), 1)
        every = np.arange(len(states))
        self.program.row(start + every, np.ones(len(states)), 1, 1)
        for s in range(len(states)):  # as many copies leave a choice as come to it, but for the first and the last
            loops = came == went
            leaving, coming = part.columns[(came == s) & ~loops], part.columns[(went == s) & ~loops]
            signs = [1.0] * len(leaving) + [-1.0] * len(coming) + [-1.0, 1.0]
            self.program.row([*leaving, *coming, start + s, end + s], signs, 0.0, 0.0)
        for i, v in enumerate(fed):
            wire = self.wires[c - 1, v]
            self.program.forbid((start + every)[~np.isin(states[:, i], [*wire])])
            self.linked(start + every, states[:, i], wire, 1)
            self.made((c + count - 1, v), states[:, i], end + every)
        return _Part(c, count, part.points, part.column, (came, went), start)

    # -- from counts to copies ---------------------------------------------------------------------

    def steps(self, part: _Part, values: np.ndarray) -> tuple[int, list[Step]]:
        """Where a chain starts, and the steps that are taken: what needs little of what is limited comes first."""
        assert part.states is not None
        counts = values[part.columns]
        order = np.argsort(self.sums[part.columns, -1], kind="stable")
        taken = [int(i) for i in order if counts[i]]
        steps = [Step(int(part.states[0][i]), int(part.states[1][i]), i, int(counts[i])) for i in taken]
        many = int(max(map(np.max, part.states))) + 1
        return int(np.argmax(values[part.start : part.start + many])), steps

    def apart(self, values: np.ndarray) -> tuple[_Part, set[int]] | None:
        """A chain with states that its steps are at, but do not get to."""
        for part in self.parts:
            if part.states is not None and (states := unreached(*self.steps(part, values))):
                return part, states
        return None

    def join(self, part: _Part, states: set[int]) -> None:
        """Whatever is done at these states, they have to be come to, or be where the chain starts."""
        assert part.states is not None
        came, went = (np.isin(side, [*states]) for side in part.states)
        inside, into = part.columns[came], part.columns[went & ~came]
        starts = [part.start + s for s in states]
        signs = [-1.0] * len(inside) + [float(part.count)] * (len(into) + len(starts))
        self.program.row([*inside, *into, *starts], signs, 0.0, np.inf)

    def choices(self, values: np.ndarray) -> Choices:
        found: list[tuple[int, ...]] = []
        shared: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal choices as one object: looked up by identity
        for part in self.parts:
            b = self.network.copies[part.first].block
            if part.states is None:
                taken = [int(np.argmax(values[part.columns]))]
            else:
                taken = walk(*self.steps(part, values))
            rows = {i: tuple(self.fronts[b].choices[part.points[i]].tolist()) for i in set(taken)}
            found += [shared.setdefault(rows[i], rows[i]) for i in taken]
        return tuple(found)
