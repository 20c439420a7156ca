"""What a ring of attention costs: its busiest device, what is sent, what is combined, and what is there meanwhile."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tapas.cost.collectives import ClusterRouter
from tapas.cost.operators import OpTable
from tapas.hardware.cluster import Link
from tapas.hardware.mesh import parse_mesh
from tapas.ir.fold import fold
from tapas.problem.build import build_problem
from tapas.problem.problem import OpVariable
from tapas.runtime.kernels.ring import Zigzag, _Ring
from tests.distributed.small import EAGER
from tests.subjects import small_subject


def table(
    family: str, bytes_per_s: float, memory_bytes_per_s: float = 1e30, mesh: str = "4", overlap: float = 0.0
) -> OpTable:
    link = Link(bytes_per_s, 0.0)
    device = replace(EAGER.device, memory_bytes_per_s=memory_bytes_per_s)
    cluster = replace(EAGER, intra=link, inter=link, device=device, overlap=overlap)
    problem = build_problem(fold(small_subject(family).graph), ClusterRouter(parse_mesh(mesh), cluster))
    operators = [v for part in problem.blocks for v in part.variables if isinstance(v, OpVariable)]
    return next(v.table for v in operators if "attention" in v.op.target)


def ratio(table: OpTable, values: np.ndarray) -> float:
    """Of a ring, to samples dealt out."""
    named = {table.choice(i).names: float(value) for i, value in enumerate(values)}
    return named["ring",] / named["d0",]


def test_all_devices_of_a_ring_have_the_same_to_do() -> None:
    """Also of a causal one, where each has an early and a late piece."""
    causal, full = table("llama", 1e30), table("vit", 1e30)
    for seconds in ("forward_seconds", "backward_seconds"):
        assert ratio(causal, getattr(causal, seconds)) == pytest.approx(1.0)
        assert ratio(full, getattr(full, seconds)) == pytest.approx(5 / (17 / 4))  # 17 tokens over 4 devices


@pytest.mark.parametrize("held", [(4, 4, 4, 4), (5, 5, 5, 2), (1, 1, 0)])
def test_what_a_zigzag_deals_out(held: tuple[int, ...]) -> None:
    """Pairs of a query and a key that it looks at, as the kernel takes them, are all there are, evenly dealt out."""
    zigzag, ranks, places = Zigzag(held), range(len(held)), iter(range(sum(held)))
    pieces = [[next(places) for _ in range(length)] for length in zigzag.pieces]
    dealt = [pieces[rank] + pieces[-1 - rank] for rank in ranks]
    assert [len(part) for part in dealt] == zigzag.lengths
    looked_at: list[set[tuple[int, int]]] = []
    for rank in ranks:
        ring = _Ring(cast(Any, SimpleNamespace(index=rank)), 1.0, (), zigzag.lengths, zigzag.firsts)
        pairs: set[tuple[int, int]] = set()
        for origin in ranks:
            start, count = ring._seen(origin)
            queries, keys = list(enumerate(dealt[rank]))[start:], list(enumerate(dealt[origin]))[:count]
            pairs |= {(q, k) for i, q in queries for j, k in keys if not ring._diagonal(origin) or j <= i}
        looked_at.append(pairs)
    assert set().union(*looked_at) == {(q, k) for q in range(sum(held)) for k in range(q + 1)}
    assert sum(map(len, looked_at)) == sum(held) * (sum(held) + 1) // 2
    if len(set(held)) == 1:
        assert len(set(map(len, looked_at))) == 1


def test_what_is_sent_combined_and_held() -> None:
    """float32: 4 samples of 8 tokens, 4 heads of 8 features, 2 for keys and values, over 4 devices."""
    queries, keys, n = 4 * 8 * 4 * 8 * 4, 4 * 8 * 2 * 8 * 4, 4
    made = table("llama", 1.0, 1.0)
    ring = next(i for i in range(len(made)) if made.choice(i).names == ("ring",))
    passed_on = 3 * (n - 1) * 2 * keys / n  # there, back, and their gradients
    exchanged = 2 * (queries + keys) / n  # queries, keys, values and results
    assert made.kernel_seconds[ring] == pytest.approx(passed_on + 2 * (n - 1) / n * exchanged)
    read_and_written = 2 * (queries + keys) / n
    # of each of n pieces: copies of keys and values for all heads, results mixed with those before
    assert made.forward_seconds[ring] == pytest.approx(read_and_written + (2 + 3) * queries + 2 * exchanged)
    held = read_and_written + (1 + 3 + 2) * queries / n + 2 * (2 + 3) * keys / n + exchanged
    assert made.working_bytes[ring] == pytest.approx(held)


def finished(pieces: int, piece: float, beside: float, after: float) -> float:
    """When a round ends, event by event: messages take turns on the link, and a piece is done when what was under way
    has come, too."""
    now = link = 0.0
    for number in range(pieces):
        if number < pieces - 1:
            link = max(link, now) + beside
        now = max(now + piece, link)
        if number:  # what comes of the own piece stays
            link = now + after
    return max(now, link)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("bytes_per_s", [1e7, 3e8, 1e9, 3e9, 1e10])
def test_what_travels_while_a_piece_is_computed(n: int, bytes_per_s: float) -> None:
    """By the events of a round; what does not overlap is waited for."""
    waited, hidden = (table("vit", bytes_per_s, mesh=str(n), overlap=share) for share in (0.0, 1.0))
    ring = next(i for i in range(len(waited)) if waited.choice(i).names == ("ring",))
    passed = float(waited.kernel_seconds[ring]) / (n - 1) / 3  # keys and values, those again, and their gradients
    times = [float(x[ring]) for x in (waited.forward_seconds, waited.backward_seconds)]
    ends = finished(n, times[0] / n, passed, 0.0), finished(n, times[1] / n, passed, passed)
    assert hidden.kernel_seconds[ring] == pytest.approx(sum(ends) - sum(times), rel=1e-6, abs=1e-15)
    assert hidden.again_seconds[ring] == pytest.approx(ends[0], rel=1e-6)
    assert hidden.kernel_seconds[ring] + hidden.hidden_seconds[ring] == pytest.approx(waited.kernel_seconds[ring])
    half = table("vit", bytes_per_s, mesh=str(n), overlap=0.5)
    assert half.hidden_seconds[ring] == pytest.approx(hidden.hidden_seconds[ring] / 2)
    assert not waited.hidden_seconds.any()


def test_what_neighbours_send() -> None:
    """float32: 4 samples of 8 tokens, 4 heads of 8 features, over 4 devices; each token looks at the one before."""
    n, row = 4, 4 * 4 * 8 * 4  # a token of all samples and heads, of keys or values
    sent, free = (table("mistral", rate, memory) for rate, memory in ((1.0, 1e30), (1e30, 1.0)))
    near = next(i for i in range(len(sent)) if sent.choice(i).names == ("near",))
    assert sent.kernel_seconds[near] == pytest.approx(2 * 2 * row)  # there and back
    whole = next(i for i in range(len(free)) if free.choice(i).names == ("R",))
    # besides shares of the same: keys and values with borders, and who of 2 sees whom of 3 instead of 8
    more = free.saved_bytes[near] - free.saved_bytes[whole] / n
    assert more == 2 * (8 / n + 1) * row + (8 / n) * (8 / n + 1) - 8 / n * 8


@pytest.mark.parametrize("names", [("near",), ("l",)])
def test_keys_beyond_a_window_are_not_computed(names: tuple[str]) -> None:
    """Of n ranks, each has 1/n of the queries, and as many keys and one more of 8."""
    made = table("mistral", 1e30)
    mine, whole = (next(i for i in range(len(made)) if made.choice(i).names == which) for which in (names, ("R",)))
    assert made.forward_seconds[mine] / made.forward_seconds[whole] == pytest.approx(1 / 4 * (2 + 1) / 8)
