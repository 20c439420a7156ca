"""What a plan costs at least that makes a given choice, for every choice of every variable of a network.

A contraction sums up what is below each table that it makes; going back through it in reverse says what is outside
of that table. Both together are the minimum with any choice made. Where the contraction was not exact these are
the minima of a relaxed network, in which parts of a variable choose as they like: lower bounds all the same.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tapas.search.around import Around, Wires
from tapas.search.contract import align_to_scope, contract
from tapas.search.measures import MultiObjectiveNetwork
from tapas.search.points import Cut
from tapas.search.restrict import Own, agreed
from tapas.search.tables import Table

BUDGET = 100_000  # entries of the largest table
ROUNDING = 1e-11  # relative: of a sum less one of its terms


def marginals(
    tables: Sequence[Table], sizes: Mapping[int, int], budget: int = BUDGET, limit: float = np.inf
) -> dict[int, np.ndarray]:
    """By variable: the least that all tables can add up to with each of its choices."""
    done = contract(tables, sizes, budget=budget, limit=limit)
    total = done.value
    found = {v: np.full(size, total) for v, size in sizes.items()}
    made = {id(t) for _, _, t in done.parts}
    outside: dict[int, np.ndarray] = {}
    for v, group, result in reversed(done.parts):
        scope = (v, *result.scope)
        # a table without variables is all there is of a component: outside of it are the others
        around = outside.pop(id(result)) if result.scope else _less(np.array(total), result.array)
        joint = sum((align_to_scope(t, scope) for t in group), start=around[None])
        joint = np.broadcast_to(joint, tuple(sizes[u] for u in scope))
        found[v] = np.maximum(found[v], joint.min(axis=tuple(range(1, joint.ndim))))
        for t in group:
            if id(t) in made:
                others = tuple(i for i, u in enumerate(scope) if u not in t.scope)
                order = [u for u in scope if u in t.scope]
                least = _less(joint.min(axis=others), t.array.transpose([t.scope.index(u) for u in order]))
                outside[id(t)] = least.transpose([order.index(u) for u in t.scope])
    return found


def _less(whole: np.ndarray, part: np.ndarray) -> np.ndarray:
    """A sum less one of its terms; where that is infinite it does not matter what is left."""
    return np.where(np.isfinite(part), whole - np.where(np.isfinite(part), part, 0.0), np.inf)


def possible(part: MultiObjectiveNetwork, cuts: Sequence[Cut]) -> dict[Own, np.ndarray] | None:
    """The choices that a plan within all cuts can make in some copy of a block; None if there is no such plan.

    One cut after the other: the first rules out most, so the others have little left to look at."""
    kept = {(b, v): np.arange(block.sizes[v]) for b, block in enumerate(part.network.blocks) for v in range(block.own)}
    for cut in cuts:
        left = _left(part, cut)
        if left is None:
            return None
        kept = {place: kept[place][mine] for place, mine in left.items()}
        part = part.restricted(left)
    return kept


def _left(part: MultiObjectiveNetwork, cut: Cut) -> dict[Own, np.ndarray] | None:
    around = Around(Wires(part.network), part.weighted(cut.weights))
    found = {}
    for b, block in enumerate(around.network.blocks):
        least = marginals([*block.tables, *around.outside(b)], dict(enumerate(block.sizes)))
        found |= {(b, v): least[v] <= cut.most + ROUNDING * abs(cut.most) for v in range(block.own)}
    return agreed(part.network, found) if all(mine.any() for mine in found.values()) else None
