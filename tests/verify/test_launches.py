"""Messages and copies of a step, counted, against what the plan says. `Report.ok` includes it for every plan that is
verified; here are plans that gather and reduce in many ways."""

import pytest

import tapas
from tapas.ir.graph import Tensor
from tapas.planner.assignment import assignment_of
from tapas.runtime.buckets import LEAST, messages
from tapas.sharding.layout import R, S, State
from tapas.sharding.route import conversion
from tapas.verify.launches import copies_of, predicted_launches
from tests.distributed.small import EAGER, FAMILIES, small
from tests.planner.test_memory import limits
from tests.subjects import small_subject
from tests.verify.solved import examine_solution

QUICK = {("llama", "fsdp"), ("llama", "megatron"), ("t5", "megatron"), ("resnet", "fsdp"), ("mixtral", "fsdp")}
CASES = [
    pytest.param(family, pin, marks=() if (family, pin) in QUICK else pytest.mark.full)
    for family in FAMILIES
    for pin in ("ddp", "fsdp", "megatron", "megatron-sp")
]


@pytest.mark.parametrize(("family", "pin"), CASES)
def test_messages_and_copies_are_as_planned(family: str, pin: str) -> None:
    solution = limits(family, "2x2", pins=[("*", pin)]).best()
    report = examine_solution(small_subject(family), solution, ("float64",), in_process=True, steps=1)
    (launched,) = report.launched.values()
    assert launched.messages == launched.predicted_messages > 0
    assert launched.excess == 0, launched


PIECED = [
    pytest.param(family, pin, pieces, marks=() if (family, pieces) in {("llama", 3), ("gpt2", 2)} else pytest.mark.full)
    for family in FAMILIES
    for pin in ("megatron-sp", "megatron")
    for pieces in (2, 3)
]


@pytest.mark.parametrize(("family", "pin", "pieces"), PIECED)
def test_pieces_are_counted_one_by_one(family: str, pin: str, pieces: int) -> None:
    solution = limits(family, "2x2", pins=[("*", pin)]).best()
    report = examine_solution(small_subject(family), solution, ("float64",), pieces, in_process=True, steps=1)
    assert report.ok
    whole = sum(predicted_launches(solution.problem.folded, assignment_of(solution), (0, 0)).messages.values())
    (launched,) = report.launched.values()
    # which has no products; and sums may go by way of the first dim, in one piece
    assert launched.messages > whole or family == "resnet" or pin == "megatron"


def test_a_block_of_split_weights_takes_one_gather_and_one_scatter() -> None:
    """However many weights it has, norms among them. The cluster's links are as fast as its memory: one that is stored
    split on another dim than the first would be exchanged rather than copied."""
    pins = [("*", "fsdp"), ("lm_head.weight", "[S(0)]")]
    solution = limits("llama", "4", pins=pins, recompute="gather").best()
    assignment = assignment_of(solution)
    found = predicted_launches(solution.problem.folded, assignment, (0,)).messages
    layers, ends = 2, 2
    assert found["forward", "all_gather", (0,)] <= 2 * (layers + ends)
    assert found["backward", "reduce_scatter", (0,)] <= layers + ends


def test_gradients_of_a_block_are_one_message_where_latency_counts() -> None:
    """As its weights, which are stored split."""
    model, inputs = small("llama")
    asked = {"mesh": "2", "cluster": EAGER, "pins": {"*": "fsdp"}, "memory": None}
    report = tapas.verify(model, inputs, **asked, in_process=True, steps=1)
    assert report.ok
    assert {sent.kind for sent in report.sent["float64"] if sent.phase == "backward"} == {"reduce_scatter"}
    layers, ends, of_the_loss = 2, 2, 1
    assert report.launched["float64"].messages <= 2 * (layers + ends) + of_the_loss


GATHERED = [  # shape, old, new, copies
    ((8, 6), S(0), R, 0),
    ((1, 8), S(1), R, 0),
    ((8, 6), S(1), R, 1),
    ((8, 6), S(0), S(1), 1),
    ((2, 8, 6), S(1), S(2), 2),
    ((8, 6), S(1, ((3, 1), (3, 1))), S(1), 2),
]


@pytest.mark.parametrize(("shape", "old", "new", "copies"), GATHERED)
def test_copies_of_a_move(shape: tuple[int, ...], old: State, new: State, copies: int) -> None:
    tensor = Tensor("x", shape, "float32", False)
    assert copies_of(conversion(old, new), old, new, tensor, (old,), (0,), (2,), (0,)) == copies


def test_gradients_are_packed_by_what_they_have_in_common() -> None:
    sizes = [("x", LEAST // 2), ("y", 1), ("x", LEAST // 2), ("x", LEAST)]
    assert messages(sizes, on_cpus=True) == [("x", [0, 2, 3]), ("y", [1])]
    assert messages(sizes, on_cpus=False) == [("x", [0, 2]), ("y", [1]), ("x", [3])]
