"""What borders cost: what is sent, what is copied, and what is there meanwhile."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tapas.capture import capture
from tapas.cost.collectives import ClusterRouter
from tapas.cost.operators import OpTable
from tapas.hardware.cluster import Link
from tapas.hardware.mesh import parse_mesh
from tapas.ir.fold import fold
from tapas.problem.build import build_problem
from tapas.problem.graph_rules import GraphRules
from tapas.problem.problem import OpVariable
from tests.distributed.small import EAGER

LATENCY = 1000.0


def table(stride: int, mesh: str, memory_bytes_per_s: float = 1e30) -> OpTable:
    """Of the second of two convolutions; the activation between them keeps nothing of its result."""
    link, device = Link(1.0, LATENCY), replace(EAGER.device, memory_bytes_per_s=memory_bytes_per_s)
    cluster = replace(EAGER, intra=link, inter=link, device=device)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.SiLU(), nn.Conv2d(4, 6, 5, stride, 2), nn.Flatten())
    graph = capture(model, (torch.randn(3, 2, 16, 16),), training=True)
    problem = build_problem(fold(graph), ClusterRouter(parse_mesh(mesh), cluster))
    operators = [v for part in problem.blocks for v in part.variables if isinstance(v, OpVariable)]
    return [v.table for v in operators if "conv" in v.op.target][-1]


def chosen(made: OpTable, *names: str) -> int:
    return next(i for i in range(len(made)) if made.choice(i).names == names)


ROW = 3 * 4 * 16 * 4  # bytes: samples, channels, columns


@pytest.mark.parametrize(("stride", "mesh", "rows"), [(1, "2", 2), (1, "4", 4), (2, "2", 2), (2, "4", 2 + 1)])
def test_what_is_sent(stride: int, mesh: str, rows: int) -> None:
    """With two devices each has one neighbour; there and back."""
    made = table(stride, mesh)
    assert made.kernel_seconds[chosen(made, "height")] == pytest.approx(2 * (rows * ROW + LATENCY))


def test_corners_are_sent_with_the_second_dim() -> None:
    made, columns = table(1, "2x2"), 2 * 3 * 4 * (8 + 4) * 4
    assert made.kernel_seconds[chosen(made, "height", "width")] == pytest.approx(
        2 * (2 * ROW / 2 + LATENCY) + 2 * (columns + LATENCY)
    )


def test_few_of_the_options() -> None:
    """Where meshes are ranked, only those that good plans use are looked at: width may be missing beside height."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Flatten())
    calls = GraphRules(fold(capture(model, (torch.randn(3, 2, 16, 16),), training=True)), False)
    router = ClusterRouter(parse_mesh("2"), EAGER)
    few = build_problem(calls, router, wanted=lambda _, options: [o for o in options if o.name != "width"] or options)
    (made,) = (v.table for part in few.blocks for v in part.variables if isinstance(v, OpVariable) and v.rule.flops)
    assert made.kernel_seconds[chosen(made, "height")] > 0


def test_what_is_held_and_copied() -> None:
    """Kept for the backward pass is what has borders, instead of what has none."""
    made, plain = table(1, "2", 1.0), 16 * ROW
    height, whole = chosen(made, "height"), chosen(made, "R")
    weight = 6 * 4 * 5 * 5 * 4
    result = 3 * 6 * 16 * 16 * 4
    bordered = (8 + 4) * ROW
    assert made.saved_bytes[height] == pytest.approx(bordered)
    assert made.saved_bytes[whole] == pytest.approx(plain)
    held = plain / 2 + result / 2 + weight + 6 * 4
    assert made.working_bytes[height] == pytest.approx(held + bordered)
    read_and_written = made.forward_seconds[height] - (plain / 2 + result / 2 + weight + 6 * 4)
    assert read_and_written == pytest.approx(2 * bordered)
    both = table(1, "2x2")
    assert both.saved_bytes[chosen(both, "height", "width")] == pytest.approx(3 * 4 * 12 * 12 * 4)
