"""Choices that can never be needed: another one does the same, moves included, for less.

Whatever surrounds an operator, choice c can be replaced by c' at the price of moving its operands from
c's layouts to those of c' and its results back. If c' with these moves is still no dearer than c, then c
may go: the optimum keeps its value. Routes obey the triangle inequality, so this is exact.
"""

from collections.abc import Sequence

import numpy as np

from tapas.cost.operators import OpTable
from tapas.sharding.routing import LayoutSpace

RIVALS = 64  # only the cheapest choices are tried as replacements: others hardly ever are


def undominated(
    table: OpTable,
    operands: Sequence[LayoutSpace | np.ndarray | None],
    results: Sequence[LayoutSpace],
) -> np.ndarray:
    """The choices worth keeping. An operand is given by its space; by a matrix of costs [source, choice]
    where those are not plain routes (weights, whose gradients may hide); or by None where it is free."""
    seconds = table.seconds
    rivals = np.argsort(seconds, kind="stable")[:RIVALS]
    excess = seconds[None, rivals] - seconds[:, None]  # [c, c']: what c' costs more by itself
    for operand, index in zip(operands, table.operands, strict=True):
        if isinstance(operand, LayoutSpace):
            excess = excess + operand.seconds[np.ix_(index, index[rivals])]
        elif operand is not None:
            worst = np.full(excess.shape, -np.inf)
            for row in operand:
                np.maximum(worst, row[None, rivals] - row[:, None], out=worst)
            excess = excess + worst
    for space, index in zip(results, table.results, strict=True):
        excess = excess + space.seconds[np.ix_(index[rivals], index)].T
    better = excess <= 0
    better[rivals, np.arange(len(rivals))] = False
    # of two choices that replace each other at no cost the first one stays
    mutual = better[rivals] & better[rivals].T
    better[rivals] &= ~(mutual & np.triu(np.ones_like(mutual)))
    return np.flatnonzero(~better.any(1))
