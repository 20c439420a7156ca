"""Who holds which slice of a weight: for every dim, the ranges of each place along the axes that split it."""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from tapas.plan.plan import Plan
from tapas.report.words import storage
from tapas.sharding.layout import parse_state, pieces, split_of

MOST_DEVICES = 4096  # that are drawn


def weights_data(plan: Plan) -> dict[str, Any]:
    """All weights, and the tables of ranges that they share."""
    sizes, axes = plan.mesh["sizes"], plan.mesh["names"]
    tables: dict[str, list[list[list[int]]]] = {}
    weights = []
    for name, states in plan.parameters.items():
        shape = plan.shapes.get(name, [])
        if name in plan.tied or not shape or prod(sizes) > MOST_DEVICES:
            continue
        layout = tuple(map(parse_state, states))
        dims = []
        for dim, size in enumerate(shape):
            split, tiling = split_of(layout, dim)
            if sum(length for length, _ in tiling) not in (0, size):
                break  # no layout of this shape: the file was changed by hand
            key = f"{size} {tiling} {split}"
            if key not in tables:
                tables[key] = ranges(size, tiling, [sizes[a] for a in split])
            dims.append({"axes": list(split), "ranges": key})
        else:
            weights.append({"name": name, "shape": shape, "stored": storage(states, axes).replace("\n", ", "),
                            "dims": dims})  # fmt: skip
    return {"weights": weights, "ranges": tables}


def ranges(size: int, tiling: Any, counts: Sequence[int]) -> list[list[list[int]]]:
    """What each place holds of a dim, the last axis counting fastest."""
    places = product(*(range(n) for n in counts))
    return [[list(r) for r in pieces(size, tiling, counts, place)] for place in places]
