"""What it costs to send tokens to experts in buffers of a fixed size: what these hold, and not what happens to be in
them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tapas.cost.collectives import ClusterRouter
from tapas.cost.operators import OpTable
from tapas.hardware.cluster import Link
from tapas.hardware.mesh import parse_mesh
from tapas.ir.capacity import with_capacity
from tapas.ir.fold import fold
from tapas.problem.build import build_problem
from tapas.problem.problem import OpVariable
from tests.distributed.small import EAGER
from tests.subjects import small_subject

TOKENS, SLOTS, WIDTH, INSIDE, FLOAT = 4 * 8, 2, 32, 24, 4


def table(capacity: float | None, mesh: str = "4", latency: float = 0.0) -> OpTable:
    link = Link(1.0, latency)
    cluster = replace(EAGER, intra=link, inter=link)
    graph = with_capacity(small_subject("mixtral").graph, capacity)
    problem = build_problem(fold(graph), ClusterRouter(parse_mesh(mesh), cluster))
    operators = [v for part in problem.blocks for v in part.variables if isinstance(v, OpVariable)]
    return next(v.table for v in operators if v.op.target == "tapas.experts.default")


def dispatched(made: OpTable, values: np.ndarray, *names: str) -> float:
    number = next(i for i in range(len(made)) if made.choice(i).names == (names or ("dispatch",)))
    return float(values[number])


@pytest.mark.parametrize("capacity", [1.0, 1.5, 4.0])
def test_buffers_are_sent_whole(capacity: float) -> None:
    """Rows four times, weights twice, counts, and whether all fits."""
    n, made = 4, table(capacity)
    rows = TOKENS / n * capacity * SLOTS  # in buffers for all ranks, of which one's own is not sent
    sent = (n - 1) / n * (rows * (4 * WIDTH + 2) * FLOAT + 4 * 8) + 2 * (n - 1) / n * 8
    assert dispatched(made, made.kernel_seconds) == pytest.approx(sent)
    saved = dispatched(made, made.saved_bytes), dispatched(table(1.0), table(1.0).saved_bytes)
    more = rows - TOKENS / n * SLOTS  # what arrives is kept, and gate and up of it
    assert saved[0] - saved[1] == pytest.approx(more * (WIDTH + 2 * INSIDE) * FLOAT)


def test_all_ranks_tell_each_other() -> None:
    """Also those of other axes: once a layer, which takes time."""
    ways = [("dispatch", "R"), ("R", "dispatch")]

    def more(*names: Any) -> float:
        late, soon = table(1.0, "2x2", 1.0), table(1.0, "2x2")
        return dispatched(late, late.kernel_seconds, *names) - dispatched(soon, soon.kernel_seconds, *names)

    assert [more(*names) for names in ways] == [pytest.approx(7 + 2 + 2)] * 2  # exchanges, and a sum over either axis


def test_nobody_has_more_to_compute_than_there_is_room_for() -> None:
    even, some, many, dropless = (table(capacity) for capacity in (1.0, 1.1, 1.5, None))
    assert some.options[-1].capacity == 1.1 and dropless.options[-1].capacity == 0
    ratio = [dispatched(made, made.forward_seconds) / dispatched(even, even.forward_seconds) for made in (some, many)]
    assert ratio == pytest.approx([1.1, 1.2])
    assert dispatched(dropless, dropless.forward_seconds) == dispatched(many, many.forward_seconds)
