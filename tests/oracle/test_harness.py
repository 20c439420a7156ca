"""The oracle itself: it refuses rules that are wrong, and finds what a rule left out."""

from dataclasses import replace

import pytest
import torch

from tapas.rules.base import Kernel, Rule
from tapas.rules.choices import Choice, Option
from tapas.rules.notation import from_labels, names
from tapas.runtime.kernels import normalize
from tapas.sharding.layout import B, P, R, S
from tests.oracle import harness
from tests.oracle.harness import Built, Case, build, choices, floats, offered, simulate
from tests.oracle.missing import forgotten


def refused(built: Built, mesh: tuple[int, ...] = (2,)) -> set[str]:
    """The options that do not stand the test."""
    found = set()
    for choice in choices(built.call, offered(built, mesh), mesh):
        try:
            simulate(built, choice, mesh)
        except AssertionError:
            found.add(choice.names[0])
    return found


def test_sums_do_not_pass_through_a_curve() -> None:
    built = build(Case("aten.relu.default", (floats(4, 6),)))
    assert refused(built) == set()
    assert refused(replace(built, rule=replace(built.rule, linear=((0,),)))) == {"P0"}


def test_a_bias_is_added_once() -> None:
    built = build(Case("aten.linear.default", (floats(4, 6), floats(2, 6), floats(2))))
    factors = tuple(replace(f, kernel=None) for f in built.rule.factors)
    assert refused(built) == set()
    assert refused(replace(built, rule=replace(built.rule, factors=factors))) == {"k"}


def test_a_maximum_is_not_a_sum() -> None:
    built = build(Case("aten.amax.default", (floats(4, 6), (1,))))
    factors = tuple(replace(f, blocked=False) for f in built.rule.factors)
    assert refused(replace(built, rule=replace(built.rule, factors=factors))) == {"d1"}


def test_gradients_are_part_of_it() -> None:
    """Each rank sees part of the work: the gradient of an operand that lacks the factor is a partial sum."""
    built = build(Case("aten.mul.Tensor", (floats(4, 6), floats(6))))
    right = Option("d0", (S(0), B), (S(0),))
    simulate(built, Choice((right,)), (2,))
    with pytest.raises(AssertionError, match="gradient of operand 1"):
        simulate(built, Choice((replace(right, operands=(S(0), R)),)), (2,))
    summed = build(Case("aten.sum.dim_IntList", (floats(4, 6), (0,))))
    simulate(summed, Choice((Option("d0", (S(0),), (P,)),)), (2,))
    with pytest.raises(AssertionError, match="result 0"):
        simulate(summed, Choice((Option("d0", (S(0),), (R,)),)), (2,))


def test_bytes_of_kernels_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that sends what it did not announce is refused."""

    def chatty(local, comms, x):
        return comms[0].sum(x.sum(1))

    monkeypatch.setattr(normalize, "chatty", chatty, raising=False)
    built = build(Case("aten.sum.dim_IntList", (floats(4, 6), (1,))))
    rule = from_labels(
        [names(2)], [names(1)], built.call, kernels={"d1": Kernel(results=("R",))}, kernel="normalize.chatty"
    )
    assert refused(replace(built, rule=rule)) == {"d1"}


def test_what_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "rule_for", lambda call: Rule())
    found = forgotten(Case("aten.linear.default", (floats(4, 6), floats(2, 6))))
    assert found == {"S(0), B -> S(0)", "B, S(0) -> S(1)", "S(1), S(1) -> P"}


def test_truth_values_have_no_partial_sums() -> None:
    built = build(Case("aten.view.default", (torch.ones(4, 6, dtype=torch.bool), (24,))))
    assert {o.name for o in offered(built, (2,))} == {"R", "f0", "f1"}
