"""Min-marginals: what a plan costs at least that makes a given choice, for every choice of every variable.

A contraction sums up what is below each table that it makes; going back through it in reverse says what is outside
of that table. Both together are the minimum with any choice made. Where the contraction was not exact these are
the minima of a relaxed network, in which parts of a variable choose as they like: lower bounds all the same.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tapas.search.contraction import contract
from tapas.search.cost_tables import Table, align_to_scope
from tapas.search.frontier_messages import FrontierIndex, FrontierMessages
from tapas.search.multi_objective import LinearCut, MultiObjectiveNetwork
from tapas.search.network import BlockVariable, common_domains

BUDGET = 100_000  # entries of the largest table
ROUNDING = 1e-11  # relative: of a sum less one of its terms


def min_marginals(
    tables: Sequence[Table], sizes: Mapping[int, int], budget: int = BUDGET, limit: float = np.inf
) -> dict[int, np.ndarray]:
    """By variable: the least that all tables can add up to with each of its choices.

    >>> from tapas.search.cost_tables import table
    >>> least = min_marginals([table((0, 1), np.array([[4.0, 1.0], [2.0, 9.0]]))], {0: 2, 1: 2})
    >>> least[0].tolist(), least[1].tolist()
    ([1.0, 2.0], [2.0, 1.0])
    """
    contraction = contract(tables, sizes, budget=budget, limit=limit)
    total = contraction.value
    least = {v: np.full(size, total) for v, size in sizes.items()}
    intermediate = {id(bucket.minimum) for bucket in contraction.buckets}
    outside: dict[int, np.ndarray] = {}
    for bucket in reversed(contraction.buckets):
        v, minimum = bucket.variable, bucket.minimum
        scope = (v, *minimum.scope)
        # a table without variables is all there is of a component: outside of it are the others
        rest = outside.pop(id(minimum)) if minimum.scope else _subtract(np.array(total), minimum.array)
        joint = sum((align_to_scope(t, scope) for t in bucket.tables), start=rest[None])
        joint = np.broadcast_to(joint, tuple(sizes[u] for u in scope))
        least[v] = np.maximum(least[v], joint.min(axis=tuple(range(1, joint.ndim))))
        for t in bucket.tables:
            if id(t) in intermediate:
                others = tuple(i for i, u in enumerate(scope) if u not in t.scope)
                order = [u for u in scope if u in t.scope]
                array = t.array.transpose([t.scope.index(u) for u in order])
                around = _subtract(joint.min(axis=others), array)
                outside[id(t)] = around.transpose([order.index(u) for u in t.scope])
    return least


def _subtract(whole: np.ndarray, part: np.ndarray) -> np.ndarray:
    """A sum less one of its terms; where that is infinite it does not matter what is left."""
    return np.where(np.isfinite(part), whole - np.where(np.isfinite(part), part, 0.0), np.inf)


def feasible_domains(
    objectives: MultiObjectiveNetwork, cuts: Sequence[LinearCut]
) -> dict[BlockVariable, np.ndarray] | None:
    """The choices that a plan within all cuts can make in some copy of a block; None if there is no such plan.

    One cut after the other: the first rules out most, so the others have little left to look at."""
    network = objectives.network
    domains = {(b, v): np.arange(network.blocks[b].sizes[v]) for b, v in network.own_variables}
    for cut in cuts:
        within = _domains_within(objectives, cut)
        if within is None:
            return None
        domains = {variable: domains[variable][rows] for variable, rows in within.items()}
        objectives = objectives.restricted(within)
    return domains


def _domains_within(objectives: MultiObjectiveNetwork, cut: LinearCut) -> dict[BlockVariable, np.ndarray] | None:
    messages = FrontierMessages(FrontierIndex(objectives.network), objectives.weighted(cut.weights))
    allowed: dict[BlockVariable, np.ndarray] = {}
    for b, block in enumerate(messages.network.blocks):
        least = min_marginals([*block.tables, *messages.outside(b)], dict(enumerate(block.sizes)))
        allowed |= {(b, v): least[v] <= cut.most + ROUNDING * abs(cut.most) for v in range(block.own)}
    return common_domains(objectives.network, allowed) if all(rows.any() for rows in allowed.values()) else None
