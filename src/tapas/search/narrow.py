"""Rule out choices that no best plan can take.

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

from tapas.search.network import BlockCopy, Choices, Network, Place, cost_of
from tapas.search.restrict import Own, agreed, original, restricted

WORK = 6_000_000_000  # table entries looked at: some seconds
ENDS = 2  # so many first and so many last copies of each block are looked at
ROUNDS = 3  # sweeps to and fro between two looks at the bound
TRIES = 20  # times each variable of a plan is reconsidered
SLOW = 0.05  # a round that closes less than this part of the gap is the last
MARGIN = 1e-8  # relative: keep what costs the same but for rounding
IMPOSSIBLE = 1e3  # times the largest cost: in place of infinity, so that differences stay numbers


@dataclass(frozen=True)
class Narrowed:
    network: Network
    kept: dict[Own, np.ndarray]  # which choices of the network it came from are still there
    bound: float
    choices: Choices | None  # the best plan known by now, in the choices of the network it came from

    def original(self, choices: Choices) -> Choices:
        """A plan of the narrowed network in the choices of the network it came from."""
        return original(self.network, self.kept, choices)


def narrow(network: Network, known: Choices | None, work: float = WORK) -> Narrowed:
    """The network without the choices that cannot be part of a better plan than the best one known.

    All of them stay where a table has more than two variables: that is not worked out here."""
    if any(len(t.scope) > 2 for block in network.blocks for t in block.tables):
        every = {(b, v): np.arange(block.sizes[v]) for b, block in enumerate(network.blocks) for v in range(block.own)}
        return Narrowed(network, every, -np.inf, known)
    short, image = _shorten(network)
    shifts, found = _ascend(_unfold(short), work)
    whole = _unfold(network)
    whole.take(shifts, image)
    found = tuple(found[image[c]] for c in range(len(network.copies)))
    if known is not None:
        found = min(known, found, key=lambda choices: cost_of(network, choices))
    bound, rise = whole.least()
    kept = _kept(whole, rise, cost_of(network, found) * (1 + MARGIN) - bound)
    return Narrowed(restricted(network, kept), kept, bound, found)


def _shorten(network: Network) -> tuple[Network, list[int]]:
    """The first and last copies of each block; and which of them stands for each copy."""
    of: dict[int, list[int]] = {}
    for c, copy in enumerate(network.copies):
        of.setdefault(copy.block, []).append(c)
    stands = {}
    for members in of.values():
        middle = members[min(ENDS, len(members) - 1)]
        for position, c in enumerate(members):
            stands[c] = c if position <= ENDS or position >= len(members) - ENDS else middle
    place = {c: i for i, c in enumerate(sorted(set(stands.values())))}
    image = [place[stands[c]] for c in range(len(network.copies))]
    copies = [network.copies[c] for c in place]
    return (
        Network(network.blocks, tuple(BlockCopy(c.block, tuple((image[p], v) for p, v in c.ports)) for c in copies)),
        image,
    )


@dataclass(eq=False, slots=True)
class _Link:
    """A table of two variables; what has been shifted out of it to either of them."""

    key: tuple[int, int, int]  # copy, and the two variables as its block numbers them
    ends: tuple[int, int]
    array: np.ndarray
    out: list[np.ndarray]

    def least(self, side: int) -> np.ndarray:
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
    places: list[Place]
    alone: list[np.ndarray]
    links: list[_Link]
    of: list[list[tuple[_Link, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.of = [[] for _ in self.places]
        for link in self.links:
            for side, v in enumerate(link.ends):
                self.of[v].append((link, side))

    def take(self, shifts: dict[tuple[int, int, int], list[np.ndarray]], image: Sequence[int]) -> None:
        """Shift costs as in a shorter network."""
        for link in self.links:
            copy, first, second = link.key
            out = shifts.get((image[copy], first, second))
            if out is not None:
                link.out = list(out)
                for v, costs in zip(link.ends, out, strict=True):
                    self.alone[v] = self.alone[v] + costs

    def least(self) -> tuple[float, list[np.ndarray]]:
        """The bound, and for each variable by how much its choices raise it."""
        total = sum(float(costs.min()) for costs in self.alone)
        rise = [costs - costs.min() for costs in self.alone]
        known: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
        for link in self.links:
            key = (id(link.array), *map(id, link.out))  # most copies in the middle are alike
            if key not in known:
                known[key] = link.least(0) - link.out[0], link.least(1) - link.out[1]
            least = known[key][0].min()
            total += float(least)
            for v, costs in zip(link.ends, known[key], strict=True):
                rise[v] += costs - least
        return total, rise

    def sweep(self, forward: bool) -> None:
        """Draw to each variable what its tables cost at least, and hand it on in equal parts."""
        for v in range(len(self.alone)) if forward else range(len(self.alone) - 1, -1, -1):
            costs = self.alone[v]
            for link, side in self.of[v]:
                least = link.least(side)
                costs = costs + (least - link.out[side])
                link.out[side] = least
            onward = [(link, side) for link, side in self.of[v] if (link.ends[1 - side] > v) == forward]
            share = costs / max(len(onward), len(self.of[v]) - len(onward), 1)
            for link, side in onward:
                link.out[side] = link.out[side] - share
            self.alone[v] = costs - len(onward) * share

    def decode(self, order: Iterable[int]) -> Choices:
        """A plan: one variable after the other, each as is best with those before it; then improved."""
        found: dict[int, int] = {}
        for v in order:
            costs = self.alone[v]
            for link, side in self.of[v]:
                other = link.ends[1 - side]
                seen = link.at(1 - side, found[other]) if other in found else link.least(side) - link.out[side]
                costs = costs + seen
            found[v] = int(costs.argmin())
        for _ in range(TRIES):  # not for ever: rounding of shifted costs could go round in circles
            improved = False
            for v, costs in enumerate(self.alone):
                costs = sum((link.at(1 - side, found[link.ends[1 - side]]) for link, side in self.of[v]), start=costs)
                best = int(costs.argmin())
                if costs[best] < costs[found[v]] - 1e-12 * abs(costs[best]):
                    found[v], improved = best, True
            if not improved:
                break
        choices: list[list[int]] = [[] for _ in self.network.copies]
        for v, (copy, _) in enumerate(self.places):
            choices[copy].append(found[v])
        return tuple(map(tuple, choices))


def _unfold(network: Network) -> _Unfolded:
    finite = [t.array[np.isfinite(t.array)] for block in network.blocks for t in block.tables]
    large = IMPOSSIBLE * (max(float(costs.max(initial=0.0)) for costs in finite) or 1.0)
    shared = {t.uid: np.where(np.isfinite(t.array), t.array, large) for b in network.blocks for t in b.tables}
    places = [(c, v) for c, copy in enumerate(network.copies) for v in range(network.blocks[copy.block].own)]
    index = {place: number for number, place in enumerate(places)}
    alone = [np.zeros(network.blocks[network.copies[c].block].sizes[v]) for c, v in places]
    links: list[_Link] = []
    for c, copy in enumerate(network.copies):
        block = network.blocks[copy.block]
        for t in block.tables:
            scope = [index[c, v] if v < block.own else index[copy.ports[v - block.own]] for v in t.scope]
            array = shared[t.uid]
            if len(set(scope)) == 1:
                alone[scope[0]] += array if len(scope) == 1 else array.diagonal()
            elif scope:
                links.append(
                    _Link(
                        (c, t.scope[0], t.scope[1]),
                        (scope[0], scope[1]),
                        array,
                        [np.zeros(size) for size in array.shape],
                    )
                )
    return _Unfolded(network, places, alone, links)


def _ascend(unfolded: _Unfolded, work: float) -> tuple[dict[tuple[int, int, int], list[np.ndarray]], Choices]:
    """Good shifts, and the best plan met on the way."""
    entries = sum(link.array.size for link in unfolded.links)
    count = len(unfolded.places)
    best, choices, bound = np.inf, None, -np.inf
    while True:
        for forward in (True, False) * ROUNDS:
            unfolded.sweep(forward)
        for order in (range(count), reversed(range(count))):
            found = unfolded.decode(order)
            cost = cost_of(unfolded.network, found)
            if choices is None or cost < best:
                best, choices = cost, found
        before, (bound, _) = bound, unfolded.least()
        work -= 2 * entries * (2 * ROUNDS + 2)
        if bound - before <= SLOW * (best - bound) or best - bound <= MARGIN * best or work < 0:
            return {link.key: link.out for link in unfolded.links}, choices


def _kept(unfolded: _Unfolded, rise: Sequence[np.ndarray], room: float) -> dict[Own, np.ndarray]:
    """What is left in any copy of a block."""
    left: dict[Own, np.ndarray] = {}
    for (c, v), mine in zip(unfolded.places, rise, strict=True):
        place = unfolded.network.copies[c].block, v
        left[place] = left.get(place, False) | (mine <= room)
    return agreed(unfolded.network, left)
