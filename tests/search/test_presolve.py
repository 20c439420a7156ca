"""What is left out or contracted away before the search costs no best plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapas.search import Network, cost_of, solve
from tapas.search.dead_ends import without_dead_ends
from tapas.search.marginal_reduction import marginal_bounds
from tapas.search.network import original_choices
from tapas.search.partial_contraction import contract_partially
from tests.search.networks import MANY, brute_force, costs, folded, unfolded


@MANY
@given(folded(costs))
def test_a_best_plan_has_no_dead_ends(network: Network) -> None:
    best = brute_force(*unfolded(network))
    fewer, left = without_dead_ends(network)
    assert brute_force(*unfolded(fewer)) == pytest.approx(best, abs=1e-9)
    found = solve(fewer)
    assert cost_of(network, original_choices(network, left, found.choices)) == pytest.approx(best, abs=1e-9)


@MANY
@given(folded(costs), st.sampled_from([1, 2, 4, 100]))
def test_a_core_has_the_costs_of_the_whole(network: Network, budget: int) -> None:
    """Also twice, with a larger budget the second time."""
    best = brute_force(*unfolded(network))
    partly = contract_partially(network, budget, 1e9)
    again = contract_partially(partly.core, 100, 1e9)
    for core in (partly.core, again.core):
        assert brute_force(*unfolded(core)) == pytest.approx(best, abs=1e-9)
    found = solve(again.core)
    whole = partly.expanded(again.expanded(found.choices))
    assert cost_of(network, whole) == pytest.approx(best, abs=1e-9)


@MANY
@given(folded(costs), st.sampled_from([2, 100]))
def test_min_marginals_leave_a_best_plan(network: Network, budget: int) -> None:
    best = brute_force(*unfolded(network))
    bounds = marginal_bounds(network, budget)
    assert bounds is not None
    reduced = bounds.below(best)
    assert reduced.bound <= best + 1e-9
    found = solve(reduced.network)
    assert cost_of(network, reduced.original(found.choices)) == pytest.approx(best, abs=1e-9)
