"""Searches that are ended before their time: whatever was found by then is handed back, and no more is claimed."""

from time import monotonic

import numpy as np
import pytest

from tapas.search import Monitor, SearchProblem, Stopped, checkpoint, cost_of, least_largest_load, solve, solve_within
from tests.search.limited import any_wiring, chain
from tests.search.test_lagrangian import check, layers


class StopsAt(Monitor):
    """Ends a search at its n-th checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    @property
    def stopped(self) -> bool:
        self.left -= 1
        return self.left < 0


def checkpoints(asked: SearchProblem) -> int:
    with StopsAt(10**9) as counting:
        solve_within(asked)
    return 10**9 - counting.left


@pytest.mark.parametrize(("made", "count"), [(any_wiring, 20), (chain, 2)])
def test_at_any_checkpoint(made, count: int) -> None:
    """Bounds are bounds, plans are plans, and a plan that was found is not lost."""
    met = {"nothing": 0, "a plan beyond": 0, "a plan": 0, "a gap": 0}
    for seed in range(count):
        network, loads = made(seed)
        asked = SearchProblem(network, loads)
        full = solve_within(asked)
        for number in {0, 1, *np.linspace(0, checkpoints(asked), 9, dtype=int).tolist()}:
            with StopsAt(number):
                found = solve_within(asked)
            check(network, loads, found)
            fitting = [p for p in found.evaluated if all(a <= x.limit for a, x in zip(p.amounts, loads, strict=True))]
            assert (found.answer is not None) == bool(fitting)
            assert not (found.infeasible and full.answer is not None)
            if found.answer is not None:
                assert full.answer is not None
                assert found.answer.cost <= min(plan.cost for plan in fitting) * (1 + 1e-6)
                assert found.answer.bound <= full.answer.cost * (1 + 1e-9)
                assert found.log[-1].cost == pytest.approx(found.answer.cost, rel=1e-6)
                met["a gap" if found.answer.gap > 0 else "a plan"] += 1
            else:
                met["a plan beyond" if found.evaluated else "nothing"] += 1
    assert min(met.values()) >= 1, met


def test_the_log_only_gets_better() -> None:
    for seed in range(20):
        found = solve_within(SearchProblem(*any_wiring(seed)))
        for before, after in zip(found.log, found.log[1:], strict=False):
            assert after.seconds >= before.seconds
            assert after.cost <= before.cost and after.bound >= before.bound
            assert after.cost < before.cost or after.bound > before.bound


def test_a_search_without_limits_hands_back_its_best() -> None:
    """Or is thrown out, where there is none."""
    network, _ = layers(40, [1e-3, 2e-3], [1e9, 0.5e9], 80e9)
    best, met = solve(network), {"plan": 0, "none": 0}
    for number in range(12):
        try:
            with StopsAt(number):
                found = solve(network)
        except Stopped:
            met["none"] += 1
            continue
        assert found.cost == cost_of(network, found.choices) and found.bound <= best.cost * (1 + 1e-12)
        met["plan"] += 1
    assert min(met.values()) >= 1


def test_the_smallest_plan_hands_back_its_best() -> None:
    network, load = layers(40, [1e-3, 2e-3], [1e9, 0.5e9], 0.0)
    with StopsAt(0):
        assert least_largest_load(network, load, lambda choices: (load.amount(network, choices), load)).choices == ()


def test_time_is_up_when_it_is() -> None:
    began = monotonic()
    with Monitor(seconds=0.2) as monitor, pytest.raises(Stopped):
        while monotonic() < began + 5:
            checkpoint()
    assert 0.2 <= monotonic() - began < 1 and monitor.why == "time limit"
    checkpoint()  # nobody watches any more


def test_a_program_over_whole_numbers_is_ended_as_well() -> None:
    """HiGHS alone would take a minute: a knapsack with many equal items, to be filled up exactly."""
    from tapas.search.highs import SparseRow, run_highs

    random = np.random.default_rng(0)
    weights = random.integers(10**5, 10**6, (8, 60)).astype(float)
    rows = [SparseRow(np.arange(60), row, row.sum() // 2, row.sum() // 2) for row in weights]
    began = monotonic()
    with Monitor(seconds=0.3) as monitor:
        run_highs(np.ones(60), np.zeros(60), np.ones(60), rows, integers=60)
    assert monitor.stopped and monotonic() - began < 10
