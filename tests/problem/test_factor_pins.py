"""Pins that say by what operators are split."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from tapas.capture import capture
from tapas.errors import PlanError
from tapas.hardware.cluster import Link
from tapas.plan.plan import Plan
from tapas.planner.pipeline import plan_graph
from tapas.planner.request import Request
from tests.distributed.small import EAGER
from tests.problem.test_problem import graph
from tests.subjects import small_subject

ATTENTION = "aten.scaled_dot_product_attention.default"


@cache
def planned(*pins: tuple[str, str]) -> Plan:
    return plan_graph(graph(), Request.of("2x4", memory=None, pins=list(pins), baselines=False))


def choices(plan: Plan, target: str = ATTENTION) -> list[tuple[str, ...]]:
    """By what the operators are split, over each axis."""
    chosen = [op.choice for op in plan.operators if op.target == target and op.module.startswith("layers.")]
    return [tuple(text.partition("|")[0] for text in texts) for texts in chosen]


def test_a_word_alone_is_for_some_axis() -> None:
    free, pinned = planned(), planned(("layers.*", "h"))
    assert not any("h" in names for names in choices(free))  # else the pin would change nothing
    assert choices(pinned) and all("h" in names for names in choices(pinned))
    assert pinned.cost > free.cost and pinned.pins == ("layers.*=h",)


def test_words_in_brackets_are_for_an_axis_each() -> None:
    assert set(choices(planned(("layers.*", "[h, *]")))) <= {("h", other) for other in ("h", "d0", "l", "R", "B")}
    assert set(choices(planned(("layers.*", "[l, h]")))) == {("l", "h")}


def test_roles_are_words_too() -> None:
    linear = choices(planned(("layers.*", "[sequence, batch]")), "aten.linear.default")
    assert linear and set(linear) == {("d1", "d0")}


def test_operators_that_have_no_such_factor_are_left_alone() -> None:
    """`layers.*` are also norms and products."""
    plan = planned(("layers.*", "[h, h]"))
    assert set(choices(plan)) == {("h", "h")} and choices(plan, "aten.layer_norm.default")


def test_positions_that_do_not_divide_are_left_alone() -> None:
    """Of the last stage, which four devices cannot deal out evenly."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten()
    )
    found = capture(model, (torch.randn(1, 3, 24, 24),), training=True)
    plan = plan_graph(found, Request.of("4", EAGER, memory=None, pins={"*": "height"}, baselines=False))
    chosen = [op.choice for op in plan.operators if op.target == "aten.conv2d.default"]
    assert chosen[0] == ("height",) and len(chosen) == 3
    assert all("height" not in names for names in chosen[1:])
    with pytest.raises(PlanError, match="do not divide into even shares"):
        plan_graph(found, Request.of("4", EAGER, memory=None, pins={"2": "height"}, baselines=False))


@pytest.mark.parametrize("strategy", ["fsdp", "megatron", "megatron-sp"])
def test_known_strategies_send_no_tokens_to_experts(strategy: str) -> None:
    """Where that would be cheaper."""
    mixture, slow = small_subject("mixtral").graph, replace(EAGER, intra=Link(1e8, 0.0))
    for pins, sent in ({}, True), ({"*": strategy}, False):
        plan = plan_graph(mixture, Request.of("4", slow, memory=None, pins=pins, baselines=False))
        chosen = {op.choice for op in plan.operators if op.target == "tapas.experts.default"}
        assert (("dispatch",) in chosen) == sent
    with pytest.raises(PlanError, match="contradicts"):
        pins = {"*": "dispatch"}
        plan_graph(mixture, Request.of("4", slow, memory=None, pins=pins, batch_split=False, baselines=False))


@pytest.mark.parametrize(
    "pin, words",
    [
        (("layers.*", "[h]"), "1 word for 2 mesh axes"),
        (("layers.*", "[h, n]"), "nothing there has all of h, n"),
        (("layers.*.q", "[h, h]"), "'h' is not a state"),
        (("layers.*", "heads"), "there is no strategy heads"),
    ],
)
def test_what_cannot_be_is_refused(pin: tuple[str, str], words: str) -> None:
    with pytest.raises(PlanError) as error:
        planned(pin)
    assert words in str(error.value)
