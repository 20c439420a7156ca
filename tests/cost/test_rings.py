"""What a ring of attention costs: its busiest device, what is sent, what is combined, and what is there meanwhile."""

from dataclasses import replace

import numpy as np
import pytest

from tapas.cost.collectives import ClusterRouter
from tapas.cost.operators import OpTable
from tapas.hardware.cluster import Link
from tapas.hardware.mesh import parse_mesh
from tapas.ir.fold import fold
from tapas.problem.build import build_problem
from tapas.problem.problem import OpVariable
from tests.distributed.small import EAGER
from tests.subjects import small_subject


def table(family: str, bytes_per_s: float, memory_bytes_per_s: float = 1e30, mesh: str = "4") -> OpTable:
    link = Link(bytes_per_s, 0.0)
    device = replace(EAGER.device, memory_bytes_per_s=memory_bytes_per_s)
    cluster = replace(EAGER, intra=link, inter=link, device=device)
    problem = build_problem(fold(small_subject(family).graph), ClusterRouter(parse_mesh(mesh), cluster))
    operators = [v for part in problem.blocks for v in part.variables if isinstance(v, OpVariable)]
    return next(v.table for v in operators if "scaled_dot_product" in v.op.target)


def ratio(table: OpTable, values: np.ndarray) -> float:
    """Of a ring, to samples dealt out."""
    named = {table.choice(i).names: float(value) for i, value in enumerate(values)}
    return named["ring",] / named["d0",]


def test_the_last_device_of_a_causal_ring_has_most_to_do() -> None:
    """All pieces but half of its own: of n, n - 1/2, where the mean is n / 2."""
    causal, full = table("llama", 1e30), table("vit", 1e30)
    for seconds in ("forward_seconds", "backward_seconds"):
        assert ratio(causal, getattr(causal, seconds)) == pytest.approx(2 - 1 / 4)
        assert ratio(full, getattr(full, seconds)) == pytest.approx(5 / (17 / 4))  # 17 tokens over 4 devices
    assert ratio(table("llama", 1e30, mesh="2"), table("llama", 1e30, mesh="2").forward_seconds) == pytest.approx(1.5)


def test_what_is_sent_combined_and_held() -> None:
    """float32: 4 samples of 8 tokens, 4 heads of 8 features, 2 for keys and values, over 4 devices."""
    queries, keys, n = 4 * 8 * 4 * 8 * 4, 4 * 8 * 2 * 8 * 4, 4
    made = table("llama", 1.0, 1.0)
    ring = next(i for i in range(len(made)) if made.choice(i).names == ("ring",))
    assert made.kernel_seconds[ring] == pytest.approx(3 * (n - 1) * 2 * keys / n)  # there, back, and their gradients
    read_and_written = 2 * (queries + keys) / n
    # of each of n pieces: copies of keys and values for all heads, results mixed with those before
    assert made.forward_seconds[ring] == pytest.approx(read_and_written + (2 + 3) * queries)
    held = read_and_written + (1 + 3 + 2) * queries / n + 2 * (2 + 3) * keys / n
    assert made.working_bytes[ring] == pytest.approx(held)
