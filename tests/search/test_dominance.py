"""Pareto dominance against comparing all points."""

import numpy as np
import pytest

from tapas.search.dominance import undominated


@pytest.mark.parametrize("measures", [1, 2, 3, 4])
def test_undominated_is_what_comparing_all_finds(measures: int) -> None:
    random = np.random.default_rng(measures)
    for size in (0, 1, 5, 60, 700):
        code, sums = random.integers(0, 3, size), random.integers(0, 6, (size, measures)) / 4.0
        kept = undominated(code, sums)
        unique = {(int(code[i]), *sums[i].tolist()) for i in kept}
        assert len(unique) == len(kept)
        points = {(int(c), *s.tolist()) for c, s in zip(code, sums, strict=True)}
        assert unique == {
            p
            for p in points
            if not any(q[0] == p[0] and q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points)
        }
