"""Decisions are written down once: a plan does the same whatever becomes of prices, and only on its own model."""

import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as T
from torch import nn

import tapas
from tapas.capture import capture, capture_program
from tapas.cost import collectives, kernels
from tapas.errors import PlanError, TapasError
from tapas.ir.fold import fold
from tapas.ir.inline import unfold
from tapas.plan.fingerprint import GraphStructure, difference, structure_of
from tapas.plan.plan import Plan, plan_from_dict
from tapas.planner.assignment import adapted, followed
from tapas.runtime.collectives import Count, Rank
from tapas.runtime.moves import Step
from tapas.runtime.program import write_program
from tapas.verify.threads import thread_axes
from tapas.verify.verification import Report
from tests.distributed.small import FAMILIES, small

MESH = (2, 2)


def llama(batch: int = 8, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    settings = {
        "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "use_cache": False,
    }  # fmt: skip
    model = T.LlamaForCausalLM(T.LlamaConfig(**{**settings, **changes})).to(dtype)
    tokens = torch.randint(0, 256, (batch, 16))
    return model, {"input_ids": tokens, "labels": tokens.clone()}


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Weights in pieces, moved before use: a plan with many routes, some of them of several steps."""
    model, inputs = llama()
    return tapas.plan(model, inputs, mesh=MESH, pins={"*": "megatron-sp"}, baselines=False)


def moves(plan: Plan, model: nn.Module, inputs: dict[str, Any]) -> list[str]:
    """All steps of the program of one rank, in order."""
    captured = capture_program(model, inputs)
    folded = fold(captured.graph)
    rank = Rank(MESH, (0, 1), thread_axes(MESH)[0, 1], Count(), torch.device("cpu"))
    program = write_program(captured.graph, folded, followed(plan, captured.graph, folded), rank)
    return [f"{name}: {step.extra_repr()}" for name, step in program.named_modules() if isinstance(step, Step)]


@pytest.fixture(scope="module")
def planned_moves(plan: Plan) -> list[str]:
    return moves(plan, *llama())


@pytest.fixture(scope="module")
def planned_report(plan: Plan) -> Report:
    """What the model does that the plan was made for."""
    model, inputs = llama()
    return tapas.verify(model, inputs, plan=plan, in_process=True, steps=1)


def scaled(figures: Any, factor: float) -> Any:
    """All numbers of a cluster's entry, but for counts; shares of a peak do not grow."""
    if isinstance(figures, dict):
        return {key: scaled(value, min(factor, 1.0) if key == "families" else factor) for key, value in figures.items()}
    return figures * factor if isinstance(figures, float) else figures


@pytest.mark.parametrize(
    "factor", [pytest.param(0.01, marks=pytest.mark.full), 0.3, pytest.param(1.2, marks=pytest.mark.full)]
)
def test_a_plan_does_the_same_at_other_prices(
    plan: Plan, planned_moves: list[str], planned_report: Report, factor: float
) -> None:
    data = json.loads(plan.to_json())
    data["cluster"] = scaled(data["cluster"], factor) | {"overlap": 0.5}
    assert data["cluster"] != json.loads(plan.to_json())["cluster"]
    other, (model, inputs) = plan_from_dict(data), llama()
    assert moves(other, model, inputs) == planned_moves
    report = tapas.verify(model, inputs, plan=other, in_process=True, steps=1)
    assert report.ok and planned_report.ok
    assert report.sent == planned_report.sent and any(report.sent.values())


@pytest.fixture
def other_prices() -> Iterator[None]:
    """Cost functions that have nothing to do with those a plan was made with."""
    compute, step = kernels.Work.seconds, collectives.Interconnect.step_seconds

    def odd(*args: Any, **kwargs: Any) -> Any:
        return tuple(1.0 / (1e-9 + seconds) for seconds in compute(*args, **kwargs))

    def strange(*args: Any, **kwargs: Any) -> Any:
        return 1e-3 / (1e-9 + step(*args, **kwargs))

    with (
        mock.patch.object(kernels.Work, "seconds", odd),
        mock.patch.object(collectives.Interconnect, "step_seconds", strange),
    ):
        yield


def test_a_plan_does_the_same_by_another_cost_model(
    plan: Plan, planned_moves: list[str], planned_report: Report, request: pytest.FixtureRequest
) -> None:
    model, inputs = llama()
    request.getfixturevalue("other_prices")
    best = tapas.plan(model, inputs, mesh=MESH, pins={"*": "megatron-sp"}, baselines=False)
    assert best.assignment != plan.assignment, "these prices make no difference"
    assert moves(plan_from_dict(json.loads(plan.to_json())), model, inputs) == planned_moves
    again = tapas.verify(model, inputs, plan=plan, in_process=True, steps=1)
    assert again.ok and again.sent == planned_report.sent


def test_loading_and_compiling_search_nothing(plan: Plan) -> None:
    import tapas.search
    from tapas.sharding.routing import LayoutSpace

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("a plan that is followed is neither searched for nor routed")

    model, inputs = llama()
    names = ("solve", "solve_within", "contract")
    patches = [mock.patch.object(tapas.search, name, forbidden) for name in names]
    patches += [mock.patch(f"tapas.planner.fit.{name}", forbidden) for name in ("ENGINE", "some_plan", "search")]
    patches += [mock.patch.object(LayoutSpace, name, forbidden) for name in ("route", "between")]
    text = plan.to_json()
    for patch in patches:
        patch.start()
    try:
        assert moves(plan_from_dict(json.loads(text)), model, inputs)
        with pytest.raises(AssertionError, match="neither searched"):  # or this test would not notice
            tapas.plan(model, inputs, mesh=MESH)
    finally:
        mock.patch.stopall()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_assignment_stays_what_it_is_on_its_graph(family: str) -> None:
    model, inputs = small(family)
    best = tapas.plan(model, inputs, mesh=MESH, baselines=False)
    graph = capture_program(model, inputs).graph
    assert plan_from_dict(json.loads(best.to_json())) == best
    for one in (graph, unfold(graph)):  # with bodies, and written out
        assert structure_of(fold(one)) == best.assignment.structure
        assert adapted(best.assignment, fold(one)) == best.assignment


# ------------------------------------------------------------------------- what a plan belongs to, and what not


@pytest.mark.parametrize(
    "batch", [pytest.param(4, marks=pytest.mark.full), pytest.param(12, marks=pytest.mark.full), 6]
)
def test_another_batch_runs_the_same_assignment(plan: Plan, planned_moves: list[str], batch: int) -> None:
    model, inputs = llama(batch=batch)
    assert moves(plan, model, inputs) == planned_moves
    assert tapas.verify(model, inputs, plan=plan, in_process=True, steps=1).ok


def test_another_precision_runs_the_same_assignment() -> None:
    model, inputs = small("packed")
    best = tapas.plan(model, inputs, mesh=MESH, pins={"*": "megatron"}, baselines=False)
    wanted = moves(best, model, inputs)
    inputs = {name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in inputs.items()}
    assert moves(best, model.to(torch.bfloat16), inputs) == wanted


def test_casts_that_come_with_another_precision_are_named(plan: Plan) -> None:
    model, inputs = llama(dtype=torch.bfloat16)
    with pytest.raises(TapasError, match=r"aten\.to\.dtype.*made in float32.*plan again in the precision"):
        tapas.verify(model, inputs, plan=plan, in_process=True)


def test_a_batch_of_one_leaves_the_structure_as_it_is() -> None:
    """Dims of size one must not be seen as no dims: GPT-2 merges batch and sequence for its products."""

    def structure(batch: int) -> GraphStructure:
        config = T.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16, use_cache=False)
        with torch.device("meta"):
            model, tokens = T.GPT2LMHeadModel(config), torch.zeros(batch, 16, dtype=torch.long)
        return structure_of(fold(capture(model, {"input_ids": tokens, "labels": tokens})))

    assert difference(structure(1), structure(4)) == ""


def test_a_batch_that_cannot_be_dealt_out_is_refused(plan: Plan) -> None:
    model, inputs = llama(batch=1)
    with pytest.raises(PlanError, match=r"cannot be split as planned .* at this size"):
        tapas.verify(model, inputs, plan=plan, in_process=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": 192}, r"layers\.0: weight \d is mlp.*192.*in the plan .*128"),
        ({"num_hidden_layers": 5}, r"continues in model\.layers\.4 where the plan continues outside"),
        ({"hidden_act": "gelu"}, r"layers\.0: operator \d+ is mlp.*gelu.*in the plan mlp.*silu"),
        ({"attention_bias": True}, r"layers\.0: weight \d is self_attn\.q_proj\.bias"),
        ({"tie_word_embeddings": True}, "made for another model"),
    ],
)
def test_the_first_difference_is_named(plan: Plan, changes: dict[str, Any], words: str) -> None:
    model, inputs = llama(**changes)
    with pytest.raises(TapasError, match=words):
        tapas.verify(model, inputs, plan=plan, in_process=True)


def test_heads_that_do_not_divide_are_refused() -> None:
    """The structure is the same, but what was planned is not legal: a head is never cut."""
    model, inputs = llama(num_key_value_heads=4)
    best = tapas.plan(model, inputs, mesh="4", pins={"*": "megatron"}, baselines=False)
    other, _ = llama(num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    with pytest.raises(PlanError, match="cannot be split as planned"):
        tapas.verify(other, inputs, plan=best, in_process=True)


def test_a_plan_for_training_is_not_one_for_inference(plan: Plan) -> None:
    model, inputs = llama()
    graph = capture_program(model, {"input_ids": inputs["input_ids"]}).graph
    with pytest.raises(PlanError, match="was made for training, this is inference"):
        followed(plan, graph, fold(graph))


def test_a_plan_says_what_it_was_made_with(plan: Plan) -> None:
    assert plan.versions["torch"] == torch.__version__ or plan.versions["torch"] in torch.__version__
    assert plan.versions["transformers"] == T.__version__ and plan.dtype == "float32"
    assert len(plan.assignment.structure.fingerprint) == 16
