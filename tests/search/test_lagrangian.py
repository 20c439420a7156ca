"""The search within limits: what trying everything finds and what an integer program proves, no more and no less."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tapas.search import (
    BlockCopy,
    BlockNetwork,
    Choices,
    Load,
    Network,
    Overrun,
    SearchProblem,
    SearchResult,
    cost_of,
    solve,
    solve_within,
    table,
)  # fmt: skip
from tapas.search.lagrangian import LagrangianSearch
from tapas.search.mixture_program import _MixtureProgram
from tests.oracle.side import least_within
from tests.search.limited import BYTES, any_wiring, chain, judged, limited_problem, verdicts


def everything(network: Network, loads: list[Load]) -> tuple[float, float] | None:
    """The least cost within the limits and the least overshoot, by trying all plans; None if there are too many."""
    owned = [network.blocks[copy.block].sizes[: network.blocks[copy.block].own] for copy in network.copies]
    if np.prod([float(size) for own in owned for size in own]) > 3000:
        return None
    least, over = np.inf, np.inf
    for choices in product(*(tuple(product(*map(range, own))) for own in owned)):
        cost = cost_of(network, choices)
        if cost < np.inf:
            beyond = max(load.amount(network, choices) - load.limit for load in loads)
            over = min(over, beyond)
            least = min(least, cost) if beyond <= 1e-3 else least
    return least, over


def check(network: Network, loads: list[Load], found: SearchResult) -> None:
    """What any result has to be, proven or not."""
    for plan in found.evaluated:
        assert plan.cost == cost_of(network, plan.choices)
        assert plan.amounts == tuple(load.amount(network, plan.choices) for load in loads)
    assert len({plan.choices for plan in found.evaluated}) == len(found.evaluated)
    assert len(found.prices) == len(loads) and min(found.prices, default=0.0) >= 0
    if found.answer is None:
        assert found.amounts is None
        return
    assert found.least_overshoot is None and not found.infeasible
    assert found.answer.cost == cost_of(network, found.answer.choices)
    assert found.answer.bound <= found.answer.cost
    assert found.amounts is not None
    assert all(amount <= load.limit + 1.0 for amount, load in zip(found.amounts, loads, strict=True))


@pytest.mark.parametrize("start", [40, *(pytest.param(at, marks=pytest.mark.full) for at in range(80, 2000, 40))])
def test_random_problems_against_an_integer_program(start: int) -> None:
    """A few of those that `make fuzz-limits` goes on with."""
    for seed in range(start, start + 40):
        for way, said in verdicts(seed, thorough=False).items():
            assert not said[:2].isupper(), (seed, way, said)
            assert way.endswith("hurried") or said in ("proven", "infeasible"), (seed, way, said)


def test_many_turns_and_paths_to_be_mended() -> None:
    """A plan was missed here, as repairs of mixtures came to an end before the last of them was looked at."""
    _, network, loads = limited_problem(194)
    assert solve_within(judged(network, loads)).answer is not None


def agree(network: Network, loads: list[Load]) -> None:
    """What the search finds and proves is what an integer program does."""
    found, proven = solve_within(SearchProblem(network, loads)), least_within(network, loads)
    check(network, loads, found)
    if proven is None:
        assert found.answer is None and found.infeasible
    else:
        assert found.answer is not None
        assert found.answer.cost == pytest.approx(proven, rel=1e-6, abs=1e-9)
        assert found.answer.gap <= 1e-12


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_small_problems_against_all_plans(start: int) -> None:
    met = {"infeasible": 0, "plain": 0, "gap": 0}
    for seed in range(start, start + 50):
        network, loads = any_wiring(seed)
        truth = everything(network, loads)
        if truth is None:
            continue
        found = solve_within(SearchProblem(network, loads))
        check(network, loads, found)
        least, over = truth
        if least == np.inf:
            met["infeasible"] += 1
            assert found.answer is None and found.infeasible, seed
            if over < np.inf:
                assert found.least_overshoot is not None
                assert found.least_overshoot.bound <= over + 1.0, seed
                assert found.least_overshoot.overshoot >= over - 1.0, seed
            continue
        assert found.answer is not None, seed
        assert found.answer.cost == pytest.approx(least, rel=1e-8), seed
        assert found.answer.bound == pytest.approx(least, rel=1e-8), seed
        met["plain" if len(found.evaluated) == 1 else "gap"] += 1
    assert min(met.values()) >= 3  # the problems are of all kinds


def test_what_only_the_most_demanding_copy_adds() -> None:
    """By trying all plans."""
    met = 0
    for seed in range(60):
        network, loads = any_wiring(seed)
        turns = tuple((table((0,), np.arange(b.sizes[0]) * 7.0 * BYTES),) for b in network.blocks)
        loads = [replace(loads[0], turns=turns, limit=loads[0].limit + 4 * BYTES), *loads[1:]]
        truth = everything(network, loads)
        if truth is None:
            continue
        found = solve_within(SearchProblem(network, loads))
        check(network, loads, found)
        if truth[0] == np.inf:
            assert found.answer is None, seed
            continue
        met += 1
        assert found.answer is not None, seed
        assert found.answer.cost == pytest.approx(truth[0], rel=1e-8), seed
        assert found.answer.bound == pytest.approx(truth[0], rel=1e-8), seed
    assert met >= 10


def test_a_referee_has_the_last_word() -> None:
    """It names a load that the search was not told of."""
    network, load = layers(100, [1e-3, 2e-3], [1e9, 0.5e9], 80e9)
    other = Load(((), (table((0,), np.array([1e9, 0.0])),)), 50e9)

    def referee(choices: Choices) -> Overrun | None:
        excess = other.amount(network, choices) - other.limit
        return Overrun(excess, other) if excess > 0 else None

    found = solve_within(SearchProblem(network, [load], referee=referee))
    assert found.answer is not None and found.answer.gap == 0.0
    assert found.answer.cost == pytest.approx(0.150, rel=1e-9)
    assert len(found.prices) == 2


def test_a_referee_may_name_many_loads() -> None:
    """Each of the cheapest plans is beyond a limit of its own, and so is any mixture of what was found before."""
    count = 20
    network = Network(
        (BlockNetwork((count + 1,), 1, (table((0,), 1e-3 * (1.0 + np.arange(count + 1))),)),), [BlockCopy(0, ())]
    )
    loads = [Load(((table((0,), row * 1e9),),), 0.5e9) for row in np.eye(count + 1)[:count]]

    def referee(choices: Choices) -> Overrun | None:
        beyond = [load for load in loads if load.amount(network, choices) > load.limit]
        return Overrun(0.5e9, beyond[0]) if beyond else None

    found = solve_within(SearchProblem(network, loads[:1], referee))
    assert found.answer is not None
    assert found.answer.cost == found.answer.bound == pytest.approx(1e-3 * (count + 1))


@pytest.mark.parametrize("start", range(1000, 1040, 20))
def test_small_problems_against_an_integer_program(start: int) -> None:
    for seed in range(start, start + 20):
        agree(*any_wiring(seed))


@pytest.mark.parametrize("seed", range(300, 330))
def test_little_work_claims_no_more_than_is_true(seed: int) -> None:
    """With hardly any searches and points, bounds are still bounds."""
    network, loads = any_wiring(seed)
    full, little = (
        solve_within(SearchProblem(network, loads)),
        solve_within(SearchProblem(network, loads, solves=1, work=0)),
    )
    check(network, loads, little)
    if full.answer is None:
        assert little.answer is None
        if full.least_overshoot is not None:
            assert (
                little.least_overshoot is not None
                and little.least_overshoot.bound <= full.least_overshoot.overshoot + 1.0
            )
    else:
        assert not little.infeasible
        if little.answer is not None:
            assert little.answer.bound <= full.answer.cost * (1 + 1e-9) <= little.answer.cost * (1 + 2e-9)
        else:
            assert little.least_overshoot is not None and little.least_overshoot.bound <= 1.0


def test_chains_against_an_integer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a chain are counted, not told apart."""
    joined: list[int] = []
    join = _MixtureProgram.connect
    monkeypatch.setattr(_MixtureProgram, "connect", lambda self, *apart: (joined.append(1), join(self, *apart)))
    for seed in range(24):
        agree(*chain(seed))
    assert joined  # some mixtures had to be told to hang together


def layers(count: int, seconds: list[float], nbytes: list[float], limit: float) -> tuple[Network, Load]:
    """Equal layers, each with a choice of its own: dear and frugal, or cheap and large. Switching costs a little."""
    first = BlockNetwork((1,), 1, (table((0,), np.zeros(1)),))
    size = len(seconds)
    layer = BlockNetwork((size, 1, 1), 2, (table((0,), np.array(seconds)), table((0, 2), np.zeros((size, 1)))))
    copies = (BlockCopy(0, ()), *(BlockCopy(1, ((c, 0 if not c else 1),)) for c in range(count)))
    load = Load(((), (table((0,), np.array(nbytes)),)), limit)
    return Network((first, layer), copies), load


def test_only_some_of_a_hundred_layers_have_to_be_frugal() -> None:
    """100 layers of 1 GB do not fit into 80: the 40 that must, halve for a millisecond each."""
    network, load = layers(100, [1e-3, 2e-3], [1e9, 0.5e9], 80e9)
    found = solve_within(SearchProblem(network, [load]))
    assert found.answer is not None and found.amounts is not None
    assert found.answer.cost == pytest.approx(0.140, rel=1e-9)
    assert found.answer.gap == 0.0
    assert found.amounts == (80e9,)
    assert sorted(own[0] for own in found.answer.choices[1:]) == [0] * 60 + [1] * 40
    assert found.prices == (pytest.approx(1e-3 / 0.5e9),)


def test_a_gap_between_prices_and_plans_is_closed() -> None:
    """A third choice that no price ever prefers fills up what is left: dual bound and best mixture differ."""
    network, load = layers(100, [1e-3, 2e-3, 1.6e-3], [1e9, 0.5e9, 0.75e9], 79.75e9)
    found = solve_within(SearchProblem(network, [load]))
    assert found.answer is not None
    assert found.answer.cost == pytest.approx(0.1406, rel=1e-9)  # 40 halve, one takes the third choice
    assert found.answer.gap == 0.0


def test_one_demanding_copy_is_enough_to_need_room() -> None:
    """Half of the layers could do what adds much at its turn, if what they add in their mean were all: none can."""
    network, load = layers(100, [1e-3, 2e-3], [1e9, 1e9], 120e9)
    turned = replace(load, turns=((), (table((0,), np.array([40e9, 0.0])),)))
    found = solve_within(SearchProblem(network, [turned], work=1_000))
    assert found.answer is not None and found.answer.cost == pytest.approx(0.2, rel=1e-9)
    assert found.answer.gap == 0.0


def test_nothing_is_done_where_the_cheapest_plan_fits() -> None:
    network, load = layers(100, [1e-3, 2e-3], [1e9, 0.5e9], 100e9)
    found = solve_within(SearchProblem(network, [load]))
    assert found.answer == solve(network)
    assert found.prices == (0.0,) and len(found.evaluated) == 1


def test_a_limit_that_nothing_can_keep() -> None:
    network, load = layers(100, [1e-3, 2e-3], [1e9, 0.5e9], 49e9)
    found = solve_within(SearchProblem(network, [load]))
    assert found.answer is None and found.infeasible
    assert found.least_overshoot is not None
    assert found.least_overshoot.overshoot == pytest.approx(1e9)
    assert found.least_overshoot.bound == pytest.approx(1e9, rel=1e-6)
    assert found.least_overshoot.plan.amounts == (50e9,)


def test_limits_that_can_be_kept_one_by_one_but_not_together() -> None:
    """Either choice keeps one of the two loads small: 10 layers of 1 or 0 GB, at most 4 GB of each."""
    network, one = layers(10, [1e-3, 1e-3], [1e9, 0.0], 4e9)
    other = Load(((), (table((0,), np.array([0.0, 1e9])),)), 4e9)
    found = solve_within(SearchProblem(network, [one, other]))
    assert found.answer is None and found.infeasible
    assert found.least_overshoot is not None and found.least_overshoot.overshoot == pytest.approx(1e9)
    assert found.least_overshoot.bound == pytest.approx(1e9)
    wider = solve_within(SearchProblem(network, [Load(one.blocks, 5e9), Load(other.blocks, 5e9)]))
    assert wider.answer is not None and wider.amounts == (5e9, 5e9)


def test_a_second_search_starts_from_the_first() -> None:
    network, load = layers(100, [1e-3, 2e-3, 2.5e-3], [1e9, 0.5e9, 0.4e9], 80e9)
    first = solve_within(SearchProblem(network, [load]))
    second = Load(((), (table((0,), np.array([2e9, 3e9, 1e9])),)), 200e9)
    fresh = solve_within(SearchProblem(network, [load, second], work=1_500_000))
    again = solve_within(
        SearchProblem(network, [load, second], prices=first.prices, evaluated=first.evaluated, work=1_500_000)
    )
    assert fresh.answer is not None and again.answer is not None
    assert fresh.answer.cost == pytest.approx(0.146, rel=1e-9)  # 16 choose the second, 20 the third
    assert again.answer.cost == pytest.approx(0.146, rel=1e-9)
    assert again.answer.gap == fresh.answer.gap == 0.0
    assert {plan.choices for plan in first.evaluated} <= {plan.choices for plan in again.evaluated}


def test_the_same_again() -> None:
    for seed in (3, 7, 11):
        assert solve_within(SearchProblem(*any_wiring(seed))) == solve_within(SearchProblem(*any_wiring(seed)))


def test_infinite_amounts_are_refused() -> None:
    network, _ = layers(2, [1e-3, 2e-3], [1.0, 0.5], 1.0)
    with pytest.raises(ValueError, match="finite"):
        solve_within(SearchProblem(network, [Load(((), (table((0,), np.array([np.inf, 1.0])),)), 1.0)]))


def test_few_searches_are_enough_for_one_load() -> None:
    """Lines are intersected, prices are not bisected."""
    for seed in range(40):
        network, loads = any_wiring(seed)
        search = LagrangianSearch(SearchProblem(network, loads[:1], budgets=(60_000,), work=0))
        search.evaluate(solve(network).choices)
        if search.plans and search.best is None:
            search.ascend(12)
            assert len(search.plans) <= 8
