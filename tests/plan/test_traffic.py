"""What a plan's moves and operators are said to send is what verification will count."""

from collections import Counter

import pytest

from tapas.ir.fold import fold
from tapas.plan.plan import Plan
from tapas.plan.traffic import predicted
from tapas.planner.pipeline import plan_graph
from tapas.planner.request import Request
from tests.distributed.small import EAGER
from tests.subjects import small_subject

ASKED = {
    "free": {}, "fsdp": {"pins": ("*=fsdp",)}, "sequence": {"pins": ("*=megatron-sp",)},
    "again": {"pins": ("*=megatron-sp",), "recompute": "block"},
    "gathered again": {"pins": ("*=fsdp",), "recompute": "gather"},
    "inference": {"training": False, "pins": ("*=megatron",)},
}  # fmt: skip
CASES = [("llama", asked) for asked in ASKED] + [("t5", "sequence"), ("t5", "gathered again"), ("mixtral", "again")]


def stated(plan: Plan) -> int:
    moved = sum(move.copies * move.sent_nbytes for move in plan.moves)
    return moved + sum(op.copies * op.sent_nbytes for op in plan.operators)


@pytest.mark.parametrize(("family", "asked"), CASES)
def test_moves_and_operators_send_what_is_predicted(family: str, asked: str) -> None:
    graph = small_subject(family).graph
    plan = plan_graph(graph, Request.of("2x2", EAGER, baselines=False, **ASKED[asked]))
    counted: Counter = predicted(fold(graph), plan.assignment)
    assert counted.total() > 0
    assert stated(plan) == counted.total()
