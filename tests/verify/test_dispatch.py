"""Experts to which tokens are sent: trained on ranks, equal to one device, whatever the routing is."""

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from tapas.errors import PlanError
from tapas.ir.capacity import with_capacity
from tapas.ir.expert_layer import ExpertLayer
from tapas.ir.fold import fold
from tapas.plan.plan import load_plan
from tapas.planner.assignment import ForeignPlan, followed
from tapas.planner.pipeline import plan_graph, router_of
from tapas.planner.request import Request
from tapas.report.words import work
from tapas.rules.choices import Choice, options
from tapas.rules.matmul import DISPATCH
from tapas.rules.tiling import Divisibility, find_tilings
from tapas.runtime.collectives import Count
from tapas.runtime.kernels import dispatch
from tapas.verify import verification
from tapas.verify.subject import Subject, capture_subject, disturb
from tapas.verify.verification import Report
from tests.distributed.small import EAGER, EXPERTS, small
from tests.ir.test_expert_layer import Reads
from tests.oracle.case import Case, floats, integers
from tests.oracle.harness import build, simulate
from tests.oracle.threads import ThreadComm
from tests.subjects import small_subject
from tests.verify.test_verify import expect

full = pytest.mark.full
SLOW = ("olmoe", "qwen3_moe", "gpt_oss_one_expert")


def examined(found: Subject, mesh: str, processes: bool = False, steps: int = 3, **asked: Any) -> Report:
    request = Request.of(mesh, EAGER, pins={"*": DISPATCH}, baselines=False, **asked)
    if request.capacity is not None:
        captured = replace(found.captured, graph=with_capacity(found.graph, request.capacity))
        found = replace(found, captured=captured)
    plan = plan_graph(found.graph, request)
    layers = [op for op in plan.operators if op.target == "tapas.experts.default"]
    assert layers and all(DISPATCH in op.choice for op in layers)
    with patch.object(verification, "PRECISIONS", ("float64",)):
        router = router_of(request)
        return verification.examine(found, plan.assignment, router, in_process=not processes, steps=steps)


@pytest.mark.parametrize("mesh", ["4", pytest.param("2x2", marks=full), pytest.param("2", marks=full)])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=full if family in ("olmoe", "qwen3_moe", "gpt_oss_one_expert") else ())
        for family in EXPERTS
    ],
)
def test_models(family: str, mesh: str) -> None:
    if family.endswith("one_expert"):
        report = examined(capture_subject(*small(family)), mesh)
        assert report.busiest == {"x": float(report.mesh.sizes[0])}  # the first rank gets all there is
    else:
        report = examined(small_subject(family), mesh)
    expect(report)
    assert "all_to_all" in {sent.kind for sent in report.sent["float64"]}


@pytest.mark.parametrize(("family", "mesh", "recompute"), [
    ("mixtral", "4", "auto"), ("mixtral", "2", "selective"), pytest.param("mixtral", "2x2", "block", marks=full),
    *(pytest.param(family, "2x2", "auto", marks=full) for family in EXPERTS if "one" not in family),
])  # fmt: skip
def test_with_a_capacity(family: str, mesh: str, recompute: str) -> None:
    """Buffers hold all tokens, and how many bytes are sent does not depend on the routing. A selective block keeps what
    came, and what all ranks have told each other."""
    report = examined(small_subject(family), mesh, capacity=4.0, recompute=recompute)
    expect(report)
    assert report.busiest == {}  # all get the same buffers
    assert "all_to_all" in {sent.kind for sent in report.sent["float64"]}


@full
@pytest.mark.parametrize("capacity", [None, 4.0])
def test_memory(capacity: float | None) -> None:
    """Of large batches, in buffers or not, what is planned is what is allocated."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(num_local_experts=8, num_hidden_layers=2, vocab_size=64, use_cache=False, **sizes)
    torch.manual_seed(0)
    model, tokens = MixtralForCausalLM(config), torch.randint(0, 64, (2, 8, 64))
    disturb(model)
    found = capture_subject(model, {"input_ids": tokens[0], "labels": tokens[1]})
    report = examined(found, "4", processes=True, steps=2, capacity=capacity)
    expect(report)
    used = report.memory["float64"]
    assert used.measured_nbytes == pytest.approx(used.predicted_nbytes, rel=0.1)


def test_a_plan_keeps_its_capacity(tmp_path: Path) -> None:
    """And runs with no other one, as without none."""
    graph, request = small_subject("mixtral").graph, Request.of("4", EAGER, pins={"*": DISPATCH}, capacity=2)
    plan_graph(graph, request).save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    assert plan.capacity == 2 and "--capacity 2" in plan.pins
    words = {work(op, "x") for op in plan.operators if op.target == "tapas.experts.default"}
    assert words == {"experts over x, tokens sent (all-to-all, capacity 2)"}
    there = with_capacity(graph, 2)
    assert followed(plan, there, fold(there)) == plan.assignment
    for other in (graph, with_capacity(graph, 3)):
        with pytest.raises(ForeignPlan, match="capacity 2"):
            followed(plan, other, fold(other))
    with pytest.raises(PlanError, match="no experts"):
        with_capacity(small_subject("llama").graph, 2)


@pytest.mark.parametrize("recompute", ["selective", pytest.param("block", marks=full)])
def test_computed_again(recompute: str) -> None:
    """A selective block keeps what was sent: bytes and messages are those of its plan in either mode."""
    visits: list[int] = []

    def busiest(assignment: Any, names: Any, counts: Any) -> dict[str, float]:
        visits.append(sum(count.visits["forward", (0,)] for count in counts))
        return {}

    with patch.object(verification, "busiest", busiest):
        expect(examined(small_subject("mixtral"), "2", recompute=recompute))
        examined(small_subject("mixtral"), "2", recompute="none")
    again, once = visits
    assert again == once * (2 if recompute == "block" else 1) > 0


def test_what_is_sent_given_the_routing() -> None:
    """Each rank gets the rows of its experts, and nothing else: to the byte."""
    routes, layers, own = dict[str, list[Tensor]](), 2, dispatch.send

    def noted(local: Any, comm: Any, held: list[int], operands: Any) -> Tensor:
        routes.setdefault(threading.current_thread().name, []).append(operands[1].detach().clone())
        return own(local, comm, held, operands)

    counted: list[Count] = []

    def busiest(assignment: Any, names: Any, counts: Any) -> dict[str, float]:
        counted.extend(counts)
        return {}

    with patch.object(dispatch, "send", noted), patch.object(verification, "busiest", busiest):
        expect(examined(small_subject("mixtral"), "2", steps=0))
    every = [torch.stack([routes[thread][layer] for thread in routes]) for layer in range(layers)]
    width, wide, experts = 32, 8, 4
    held = experts // 2
    mine = [sum(int((index // held == rank).sum()) for index in every) for rank in range(2)]
    assert mine[0] != mine[1]  # else the routing is of no account
    got = [count.visits["forward", (0,)] for count in counted]
    assert sorted(got) == sorted(rows * (width + 1) * wide for rows in mine)


@pytest.mark.parametrize("capacity", [None, 2.0])
def test_host_reads(capacity: float | None) -> None:
    """Sizes are read once going forward, and never going back; with a capacity not at all. The rest stays on the
    device."""
    given = floats(6, 16), floats(6, 2), floats(4, 16, 16), floats(4, 16, 8)
    hidden, weight, gate_up, down = (x.float() for x in given)
    args, said = (hidden, integers(6, 2, high=4), weight, gate_up, down, "silu"), {"capacity": capacity}
    built = build(Case("tapas.experts.default", args, said if capacity else {}))
    found = find_tilings([(built.op, built.call, built.rule)], Divisibility((2,)), set())[0][0]
    chosen = next(o for o in options(built.rule, built.call, found, Divisibility((2,))) if o.name == DISPATCH)
    own, lists, modes = Tensor.tolist, Counter[str](), dict[str, Reads]()

    def tolist(x: Tensor) -> Any:
        lists[threading.current_thread().name] += 1
        return own(x)

    sender = "send_buffers" if capacity else "send"
    sent = getattr(dispatch, sender)

    def watched(*args: Any) -> Tensor:
        with Reads() as reads:
            modes[threading.current_thread().name] = reads
            return sent(*args)

    on_device = patch.object(ExpertLayer, "on_device", property(lambda _: True))
    unchecked = patch.object(ThreadComm, "checked", lambda _, x, *others: x)  # which is for the device to do
    with patch.object(Tensor, "tolist", tolist), patch.object(dispatch, sender, watched), on_device, unchecked:
        simulate(built, Choice((chosen,)), (2,))
    assert sorted(lists.values()) == ([] if capacity else [1, 1])
    assert len(modes) == 2 and not any(reads.counted for reads in modes.values())
