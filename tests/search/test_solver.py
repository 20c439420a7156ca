"""The search on small random networks: it finds what trying everything finds, and proves no more."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapas.search import BlockCopy, BlockNetwork, Network, cost_of, solve, table
from tapas.search.cost_tables import evaluate
from tests.properties import examples
from tests.search.networks import MANY, brute_force, costs, folded, unfolded


@settings(MANY, max_examples=examples(400))
@given(folded())
def test_solve_is_brute_force_on_the_unfolded_network(network: Network) -> None:
    answer = solve(network)
    best = brute_force(*unfolded(network))
    assert answer.cost == pytest.approx(best, abs=1e-9)
    assert answer.bound <= answer.cost
    assert answer.bound == pytest.approx(best, abs=1e-9)
    assert cost_of(network, answer.choices) == answer.cost
    together = brute_force(*unfolded(network, alike=True))
    assert answer.alike == (together <= best + 1e-9 * best)  # alike wherever that costs nothing


@settings(MANY, max_examples=examples(100))
@given(folded(costs))
def test_solve_with_forbidden_pairs(network: Network) -> None:
    answer = solve(network)
    assert answer.cost == brute_force(*unfolded(network))
    assert answer.bound <= answer.cost


@MANY
@given(folded(), st.data())
def test_cost_of_is_the_sum_over_the_unfolded_network(network: Network, data: st.DataObject) -> None:
    owned = [network.blocks[copy.block].sizes[: network.blocks[copy.block].own] for copy in network.copies]
    choices = [tuple(data.draw(st.integers(0, size - 1)) for size in sizes) for sizes in owned]
    tables, _ = unfolded(network)
    number = {}
    for c, copy in enumerate(network.copies):  # the order in which `unfolded` numbers them
        for v in range(network.blocks[copy.block].own):
            number[c, v] = len(number)
    values = {number[c, v]: choice for c, own in enumerate(choices) for v, choice in enumerate(own)}
    assert cost_of(network, choices) == pytest.approx(evaluate(tables, values), abs=1e-9)


@settings(MANY, max_examples=examples(100))
@given(folded(), st.integers(1, 6))
def test_small_budget_never_claims_too_much(network: Network, budget: int) -> None:
    answer = solve(network, budgets=(budget,))
    best = brute_force(*unfolded(network))
    assert answer.bound <= best + 1e-9
    assert answer.cost >= best - 1e-9
    assert cost_of(network, answer.choices) == answer.cost
    assert len(answer.choices) == len(network.copies)


def chain(length: int, alone: list[float], between: list[list[float]], ends: list[float]) -> Network:
    """A block that costs `alone` and reads its predecessor's choice; the last copy feeds `ends`."""
    start = BlockNetwork((2,), 1, (table((0,), np.zeros(2)),))
    block = BlockNetwork((2, 2), 1, (table((0,), np.array(alone)), table((1, 0), np.array(between))))
    stop = BlockNetwork((1, 2), 1, (table((1,), np.array(ends)),))
    copies = [BlockCopy(0, ()), *(BlockCopy(1, ((i, 0),)) for i in range(length)), BlockCopy(2, ((length, 0),))]
    return Network((start, block, stop), tuple(copies))


def test_copies_differ_where_that_is_cheaper() -> None:
    """The end wants choice 1, which is dear in the middle: only the last copy switches."""
    network = chain(6, [0.0, 1.0], [[0.0, 0.5], [0.0, 0.0]], [10.0, 0.0])
    answer = solve(network)
    assert answer.cost == answer.bound == 1.5
    assert not answer.alike
    assert [own[0] for own in answer.choices[1:-1]] == [0, 0, 0, 0, 0, 1]


def test_copies_are_alike_where_that_is_as_cheap() -> None:
    answer = solve(chain(6, [0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]))
    assert answer.alike
    assert answer.cost == answer.gap == 0.0


def test_depth_costs_little() -> None:
    """Equal copies are contracted once: a thousand layers are found from a few products."""
    answer = solve(chain(1000, [0.0, 1.0], [[0.0, 5.0], [5.0, 0.0]], [3.0, 0.0]))
    assert answer.cost == answer.bound == 3.0
    assert answer.alike


def test_edges_between_first_inner_and_last_copies_all_count() -> None:
    network = chain(4, [0.0, 0.0], [[1.0, 1.0], [1.0, 1.0]], [1.0, 1.0])
    assert solve(network).cost == 5.0
    assert all(before.block <= after.block for before, after in pairwise(network.copies))
