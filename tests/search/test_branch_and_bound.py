"""Splits of all plans by how many copies make a choice."""

import pytest

from tapas.search import SearchProblem
from tapas.search.branch_and_bound import _BranchAndBound
from tapas.search.lagrangian import LagrangianSearch
from tests.oracle.side import least_within
from tests.search.limited import CLOSE, SECONDS, limited_problem

SEEDS = (4, 7, 20, 23)  # chains and others whose best mixtures have a part of a copy


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_have_higher_bounds_and_one_has_the_best_plan(seed: int) -> None:
    _, network, loads = limited_problem(seed)
    truth = least_within(network, loads)
    search = LagrangianSearch(SearchProblem(network, loads))
    assert truth is not None and search.begin() is None
    search.ascend(8)
    tree = _BranchAndBound(search)
    fraction = tree.fractional(tree.lowest)
    assert fraction is not None
    parts = tree.split_count(tree.lowest, fraction)
    bounds = [part.bound for part in parts]
    assert all(part.bound >= search.lower_bound for part in parts)
    assert min(bounds) <= truth + CLOSE * SECONDS
