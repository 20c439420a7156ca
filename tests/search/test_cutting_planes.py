"""Prices from the plans known so far."""

import numpy as np
import pytest

from tapas.search.cutting_planes import infeasibility_prices, lagrangian_prices


@pytest.mark.parametrize("loads", [1, 2, 3, 5])
def test_prices_are_the_best_ones(loads: int) -> None:
    random = np.random.default_rng(loads)
    for _ in range(20):
        costs, over = random.random(12), random.normal(size=(12, loads))
        over[0] = -0.1
        best = lagrangian_prices(costs, over, 100.0)
        mixed = infeasibility_prices(over)
        assert best.value == pytest.approx((costs + over @ best.prices).min())
        assert mixed.prices.sum() == pytest.approx(1.0)
        for _ in range(200):
            other = np.clip(best.prices + random.normal(size=loads) * 10.0 ** random.integers(-4, 1), 0.0, 100.0)
            assert (costs + over @ other).min() <= best.value + 1e-9
            other = np.clip(mixed.prices + random.normal(size=loads) * 0.1, 1e-9, None)
            assert (over @ (other / other.sum())).min() <= mixed.value + 1e-9
