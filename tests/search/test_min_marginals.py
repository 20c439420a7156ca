"""Min-marginals against trying everything."""

import numpy as np
import pytest

from tapas.search import table
from tapas.search.min_marginals import min_marginals
from tests.search.networks import brute_force


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("budget", [4, 100_000])
def test_marginals_are_what_trying_everything_finds(seed: int, budget: int) -> None:
    random = np.random.default_rng(seed)
    sizes = {v: int(random.integers(1, 4)) for v in range(5)}
    tables = []
    for _ in range(7):
        scope = tuple(random.permutation(5)[: random.integers(1, 4)].tolist())
        array = random.integers(0, 9, size=tuple(sizes[v] for v in scope)).astype(float)
        array[random.random(array.shape) < 0.1] = np.inf
        tables.append(table(scope, array))
    found = min_marginals(tables, sizes, budget)
    for v, size in sizes.items():
        for choice in range(size):
            pinned = table((v,), np.where(np.arange(size) == choice, 0.0, np.inf))
            least = brute_force([*tables, pinned], sizes)
            if budget == 4:
                assert found[v][choice] <= least + 1e-9
            else:
                assert found[v][choice] == pytest.approx(least)
