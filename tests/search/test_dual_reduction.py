"""Choices that are ruled out are none that a best plan needs."""

import numpy as np
import pytest
from hypothesis import given

from tapas.search import BlockCopy, BlockNetwork, Network, Table, contract, cost_of, solve, table
from tapas.search.dual_reduction import reduce_by_dual_bounds
from tests.search.networks import MANY, brute_force, costs, folded, unfolded


@MANY
@given(folded(costs))
def test_reduction_keeps_a_best_plan(network: Network) -> None:
    best = brute_force(*unfolded(network))
    reduced = reduce_by_dual_bounds(network, None)
    assert reduced.choices is not None
    assert reduced.bound <= best + 1e-9
    assert cost_of(network, reduced.choices) >= best - 1e-9
    answer = solve(reduced.network)
    assert answer.cost == pytest.approx(best, abs=1e-9)
    assert cost_of(network, reduced.original(answer.choices)) == pytest.approx(best, abs=1e-9)


def layers(seed: int, length: int) -> Network:
    """Layers that read the one before and, all of them, one shared variable."""
    random = np.random.default_rng(seed)

    def costs(*scope: int) -> Table:
        return table(scope, random.random((5,) * len(scope)).round(2))

    start = BlockNetwork((5, 5), 2, (costs(0), costs(1), costs(0, 1)))
    pairs = [(0, 1), (1, 2), (3, 0), (4, 1), (0, 2), (4, 2)]
    layer = BlockNetwork((5,) * 5, 3, (costs(0), costs(2), *(costs(*pair) for pair in pairs)))
    stop = BlockNetwork((5, 5), 1, (costs(1, 0),))
    inner = [BlockCopy(1, ((c, 2 if c else 0), (0, 1))) for c in range(length)]
    return Network((start, layer, stop), (BlockCopy(0, ()), *inner, BlockCopy(2, ((length, 2),))))


@pytest.mark.parametrize("length", [1, 4, 5, 6, 12, 40])
def test_reduction_of_many_layers(length: int) -> None:
    """Shifts are found on a few layers and hold for all of them."""
    smaller = 0
    for seed in range(10):
        network = layers(seed, length)
        best = contract(*unfolded(network)).value
        reduced = reduce_by_dual_bounds(network, None)
        assert reduced.bound <= best + 1e-9
        assert solve(reduced.network).cost == pytest.approx(best, abs=1e-9)
        before, after = (sum(sum(b.sizes) for b in n.blocks) for n in (network, reduced.network))
        smaller += after < before
        answer = solve(network, budgets=(5,))  # too small for anything but reduction
        assert answer.bound <= best + 1e-9 <= answer.cost + 2e-9
    assert smaller >= 5


def test_larger_tables_are_not_reduced() -> None:
    block = BlockNetwork((2, 2, 2), 3, (table((0, 1, 2), np.zeros((2, 2, 2))),))
    network = Network((block,), (BlockCopy(0, ()),))
    assert reduce_by_dual_bounds(network, None).network is network
