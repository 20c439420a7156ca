"""The search on small random networks: it finds what trying everything finds, and proves no more."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapas.search import BlockCopy, BlockNetwork, Network, Table, cost_of, solve, table
from tapas.search.contract import Memo, contract
from tapas.search.folded import brute_force, coordinate_descent
from tapas.search.narrow import narrow
from tapas.search.tables import diagonal_table, evaluate
from tests.properties import examples

MANY = settings(max_examples=examples(200), deadline=None, derandomize=True)
costs = st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.5, 7.25, 0.125, float("inf")])
finite = st.sampled_from([0.0, 1.0, 2.0, 3.5, 7.25, 0.125])


def arrays(draw: st.DrawFn, shape: tuple[int, ...], entries: st.SearchStrategy[float]) -> np.ndarray:
    count = int(np.prod(shape))
    return np.array(draw(st.lists(entries, min_size=count, max_size=count))).reshape(shape)


@st.composite
def networks(
    draw: st.DrawFn, entries: st.SearchStrategy[float] = costs, largest: int = 3
) -> tuple[list[Table], dict[int, int]]:
    """Any graph, cycles and parallel tables included; tables of up to three variables."""
    sizes = {v: draw(st.integers(1, 4)) for v in range(draw(st.integers(2, 6)))}
    tables = []
    for _ in range(draw(st.integers(0, 8))):
        scope = draw(st.lists(st.sampled_from(sorted(sizes)), min_size=1, max_size=largest, unique=True))
        tables.append(table(scope, arrays(draw, tuple(sizes[v] for v in scope), entries)))
    return tables, sizes


# -- contraction -------------------------------------------------------------------------------------


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
    assert len(memo.known) <= 12


def test_tied_takes_the_diagonal() -> None:
    array = np.arange(27.0).reshape(3, 3, 3)
    made = diagonal_table((7, 4, 7), array)
    assert made.scope == (7, 4)
    assert all(made.array[i, j] == array[i, j, i] for i in range(3) for j in range(3))
    with pytest.raises(ValueError, match="twice"):
        table((1, 1), np.zeros((2, 2)))
    with pytest.raises(ValueError, match="dims"):
        table((1,), np.zeros((2, 2)))


# -- blocks and copies -------------------------------------------------------------------------------


@st.composite
def folded(draw: st.DrawFn, entries: st.SearchStrategy[float] = finite) -> Network:
    """Random blocks; copies whose ports may be bound to any earlier variable of the right size.

    So chains, shared ports, alternating blocks, side outputs, and two ports bound to one variable occur.
    """
    blocks = []
    for number in range(draw(st.integers(1, 3))):
        own = draw(st.integers(1, 3))
        ports = draw(st.integers(0, 2)) if number else 0
        sizes = (2, *(draw(st.integers(1, 3)) for _ in range(own - 1)), *([2] * ports))
        tables = [table((v,), arrays(draw, (sizes[v],), entries)) for v in range(own)]
        pairs = [(u, v) for u in range(len(sizes)) for v in range(len(sizes)) if u != v and min(u, v) < own]
        for _ in range(draw(st.integers(0, 5)) if pairs else 0):
            pair = draw(st.sampled_from(pairs))
            tables.append(table(pair, arrays(draw, (sizes[pair[0]], sizes[pair[1]]), entries)))
        blocks.append(BlockNetwork(sizes, own, tuple(tables)))
    copies = [BlockCopy(0, ())]
    for _ in range(draw(st.integers(0, 4))):
        b = draw(st.integers(0, len(blocks) - 1))
        places = [
            (c, v)
            for c, copy in enumerate(copies)
            for v in range(blocks[copy.block].own)
            if blocks[copy.block].sizes[v] == 2
        ]
        wanted = len(blocks[b].sizes) - blocks[b].own
        copies.append(BlockCopy(b, tuple(draw(st.lists(st.sampled_from(places), min_size=wanted, max_size=wanted)))))
    used = sorted({copy.block for copy in copies})
    return Network(
        tuple(blocks[b] for b in used), tuple(BlockCopy(used.index(copy.block), copy.ports) for copy in copies)
    )


def unfolded(network: Network, alike: bool = False) -> tuple[list[Table], dict[int, int]]:
    """Every copy written out, with variables of its own or (alike) with those of its block."""
    number: dict[tuple[int, int], int] = {}
    sizes: dict[int, int] = {}

    def variable(copy: int, v: int) -> int:
        key = (network.copies[copy].block if alike else copy, v)
        found = number.setdefault(key, len(number))
        sizes[found] = network.blocks[network.copies[copy].block].sizes[v]
        return found

    tables = []
    for c, copy in enumerate(network.copies):
        block = network.blocks[copy.block]
        own = [variable(c, v) for v in range(block.own)]
        names = [*own, *(variable(*place) for place in copy.ports)]
        tables += [diagonal_table([names[v] for v in t.scope], t.array) for t in block.tables]
    return tables, sizes


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


# -- narrowing ---------------------------------------------------------------------------------------


@MANY
@given(folded(costs))
def test_narrowing_keeps_a_best_plan(network: Network) -> None:
    best = brute_force(*unfolded(network))
    narrowed = narrow(network, None)
    assert narrowed.choices is not None
    assert narrowed.bound <= best + 1e-9
    assert cost_of(network, narrowed.choices) >= best - 1e-9
    answer = solve(narrowed.network)
    assert answer.cost == pytest.approx(best, abs=1e-9)
    assert cost_of(network, narrowed.original(answer.choices)) == pytest.approx(best, abs=1e-9)


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
def test_narrowing_of_many_layers(length: int) -> None:
    """Shifts are found on a few layers and hold for all of them."""
    narrower = 0
    for seed in range(10):
        network = layers(seed, length)
        best = contract(*unfolded(network)).value
        narrowed = narrow(network, None)
        assert narrowed.bound <= best + 1e-9
        assert solve(narrowed.network).cost == pytest.approx(best, abs=1e-9)
        before, after = (sum(sum(b.sizes) for b in n.blocks) for n in (network, narrowed.network))
        narrower += after < before
        answer = solve(network, budgets=(5,))  # too small for anything but narrowing
        assert answer.bound <= best + 1e-9 <= answer.cost + 2e-9
    assert narrower >= 5


def test_larger_tables_are_not_narrowed() -> None:
    block = BlockNetwork((2, 2, 2), 3, (table((0, 1, 2), np.zeros((2, 2, 2))),))
    network = Network((block,), (BlockCopy(0, ()),))
    assert narrow(network, None).network is network


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
