"""Contraction finds what trying everything finds, and proves no more."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapas.search import Table, contract, coordinate_descent, table
from tapas.search.contraction import Memo
from tapas.search.cost_tables import evaluate
from tests.search.networks import MANY, brute_force, finite, networks


@MANY
@given(networks())
def test_contraction_is_brute_force(network: tuple[list[Table], dict[int, int]]) -> None:
    tables, sizes = network
    found = contract(tables, sizes)
    best = brute_force(tables, sizes)
    assert found.exact
    assert found.value == best
    if best < float("inf"):
        choices = found.decode({})
        assert sorted(choices) == sorted(sizes)
        assert evaluate(tables, choices) == best


@MANY
@given(networks(), st.data())
def test_kept_variables(network: tuple[list[Table], dict[int, int]], data: st.DataObject) -> None:
    """What is left is, for each choice of the kept variables, the best that the others can do."""
    tables, sizes = network
    keep = data.draw(st.lists(st.sampled_from(sorted(sizes)), unique=True, max_size=2))
    found = contract(tables, sizes, keep)
    assert all(set(t.scope) <= set(keep) for t in found.tables)
    for values in np.ndindex(*(sizes[v] for v in keep)):
        fixed = dict(zip(keep, map(int, values), strict=True))
        pinned = [table((v,), np.where(np.arange(sizes[v]) == value, 0.0, np.inf)) for v, value in fixed.items()]
        best = brute_force([*tables, *pinned], sizes)
        assert evaluate(found.tables, fixed) == best
        if best < float("inf"):
            choices = found.decode(fixed)
            assert fixed.items() <= choices.items()
            assert evaluate(tables, choices) == best


@MANY
@given(networks(finite), st.integers(1, 12))
def test_small_budget_gives_a_bound(network: tuple[list[Table], dict[int, int]], budget: int) -> None:
    tables, sizes = network
    found = contract(tables, sizes, budget=budget)
    best = brute_force(tables, sizes)
    assert found.value <= best + 1e-9
    if found.exact:
        assert found.value == best
    assert best - 1e-9 <= evaluate(tables, coordinate_descent(tables, sizes, found.decode({})))


def clique(n: int, size: int) -> tuple[list[Table], dict[int, int]]:
    random = np.random.default_rng(0)
    pairs = [(u, v) for u in range(n) for v in range(u)]
    return [table(pair, random.random((size, size))) for pair in pairs], dict.fromkeys(range(n), size)


def test_what_does_not_fit_is_not_called_exact() -> None:
    tables, sizes = clique(5, 4)
    assert contract(tables, sizes).exact
    small = contract(tables, sizes, budget=16)
    assert not small.exact
    assert small.value < brute_force(tables, sizes)


def test_large_tables_are_minimised_piece_by_piece() -> None:
    """Above AT_ONCE the sum of a variable's tables is never built as a whole."""
    random = np.random.default_rng(1)
    tables = [table((0, v), random.random((90, 80))) for v in (1, 2)] + [table((1, 2), random.random((80, 80)))]
    found = contract(tables, {0: 90, 1: 80, 2: 80})
    whole = tables[0].array[:, :, None] + tables[1].array[:, None, :] + tables[2].array
    assert found.value == pytest.approx(whole.min(), rel=1e-12)
    assert contract(tables, {0: 90, 1: 80, 2: 80}, keep=(1, 2)).tables[-1].array.shape == (80, 80)


def test_equal_eliminations_are_done_once() -> None:
    """Between two ends that stay, a chain of equal links is a power: far fewer products than links."""
    links = 64
    link = table((0, 1), np.random.default_rng(2).random((5, 5)))
    memo = Memo()
    chained = [link.on((i, i + 1)) for i in range(links)]
    found = contract(chained, dict.fromkeys(range(links + 1), 5), keep=(0, links), memo=memo)
    power = link.array
    for _ in range(links - 1):
        power = (power[:, :, None] + link.array[None]).min(1)
    assert found.tables[0].scope in ((0, links), (links, 0))
    assert np.allclose(found.tables[0].array, power if found.tables[0].scope[0] == 0 else power.T, rtol=1e-12)
    assert len(memo.minima) <= 12
