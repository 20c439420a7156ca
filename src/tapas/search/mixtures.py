"""The best plan of networks with few choices left, under limits: what blocks may do, then how many copies do what."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapas.search.around import Around, Wires
from tapas.search.fronts import block_fronts, row_fronts
from tapas.search.measures import MultiObjectiveNetwork
from tapas.search.mixing import Goal, mixed
from tapas.search.network import Choices
from tapas.search.points import Cut, Trim

Rows = Sequence[np.ndarray]  # per block: [row, own variable]


@dataclass(frozen=True)
class Found:
    choices: Choices | None  # None: nothing within the cuts was found
    bound: float  # of the goal, for all plans that were looked at
    dropped: float  # what was not looked at, for want of room, is above some value cut by at least this
    work: int  # points compared


def mixture_of_points(part: MultiObjectiveNetwork, cuts: Sequence[Cut], goal: Goal, work: float) -> Found:
    """The best plan within all cuts. `work` is how many points may be compared."""
    wires, trim = Wires(part.network), Trim(cuts)
    around = [Around(wires, part.weighted(cut.weights)) for cut in cuts]
    if any(a.least > cut.most for a, cut in zip(around, cuts, strict=True)):
        return Found(None, np.inf, np.inf, 0)
    blocks = range(len(part.network.blocks))
    fronts = [block_fronts(part, b, wires, around, trim, work) for b in blocks]
    best = mixed(part, fronts, [wires.outward(b) for b in blocks], goal)
    return Found(best.choices, best.bound, trim.dropped, trim.work)


def mixture_of_rows(part: MultiObjectiveNetwork, goal: Goal, rows: Rows) -> Found:
    """The best plan in which blocks choose only as one of their rows says."""
    wires = Wires(part.network)
    fronts = [row_fronts(part, b, wires, own) for b, own in enumerate(rows)]
    best = mixed(part, fronts, [wires.outward(b) for b in range(len(rows))], goal)
    return Found(best.choices, best.bound, np.inf, 0)
