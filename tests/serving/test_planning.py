"""Plans for serving: both programs, what they share, and what they are compared with."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import tapas
from tapas.errors import TapasError
from tapas.hardware.cluster import COLLECTIVES
from tapas.ir.fold import fold
from tapas.models.tiny import tiny_config
from tapas.planner.assignment import followed
from tapas.serving.planning import cache_patterns, captured_phases, unlike_copies
from tapas.serving.plans import ServingPlan
from tapas.serving.static_cache import is_cache
from tapas.serving.step import generation_step
from tapas.serving.workload import Workload
from tapas.sharding.layout import R, S
from tests.distributed.small import EAGER
from tests.serving.models import generating

SERVED: dict[str, Any] = {"batch": 4, "prompt": 6, "new": 8}


@cache
def planned(family: str = "llama", **options: Any) -> ServingPlan:
    return tapas.plan_serving(generating(family), mesh=2, cluster=EAGER, **SERVED, **options)


def test_the_two_programs_hold_weights_and_cache_alike() -> None:
    plan = planned(batch_split=False)
    assert plan.cache_layouts == {"model.layers.*.self_attn": ("S(1)",)}
    assert plan.prefill.parameters == plan.decode.parameters
    assert any(layout == ["S(0)"] for layout in plan.prefill.parameters.values())


def test_a_batch_is_dealt_out_with_its_cache() -> None:
    assert planned().cache_layouts == {"model.layers.*.self_attn": ("S(0)",)}


def test_places_are_dealt_out_where_memory_is_short() -> None:
    """One sample, and more devices than KV heads: nothing else makes the cache smaller."""
    model, given = generating("llama"), {"mesh": 4, "cluster": EAGER, "batch": 1, "prompt": 8, "new": 2000}
    free = tapas.plan_serving(model, baselines=False, **given)
    assert set(free.cache_layouts.values()) == {("R",)}
    plan = tapas.plan_serving(model, baselines=False, memory=0.5 * free.figures.nbytes, **given)
    assert plan.cache_layouts == {"model.layers.*.self_attn": ("S(2)",)}
    assert plan.cache < 0.3 * free.cache


def test_layers_that_hold_their_caches_alike_are_told_together() -> None:
    held = {f"model.layers.{i}.attn.{what}": (S(2 if i < 2 else 1),) for i in range(4) for what in ("k", "v")}
    assert cache_patterns(held, set(held)) == {
        "model.layers.{0-1}.attn": ("S(2)",),
        "model.layers.{2-3}.attn": ("S(1)",),
    }


def test_copies_are_parted_as_the_other_program_holds_them() -> None:
    """Which of its own copies are alike: the other program may have them in other blocks."""
    prefill, _ = captured_phases(generation_step(generating("llama"), Workload(**SERVED)))
    folded = fold(prefill.graph)
    weights = [leaf.paths[0] for leaf in folded.parameters]
    alike = dict.fromkeys(weights, (R,))
    assert unlike_copies(folded, alike) == []
    assert unlike_copies(folded, alike | {"model.layers.1.mlp.up_proj.weight": (S(0),)}) == ["model.layers.{1}"]


def test_bytes_of_the_cache() -> None:
    """Keys and values of two layers, two heads of eight features, in float64; half of it on each device."""
    plan = planned(batch_split=False)
    whole = 2 * 2 * 4 * 2 * (6 + 8) * 8 * 8
    assert plan.cache == whole // 2
    for phase in (plan.prefill, plan.decode):
        assert whole // 2 <= phase.memory["constants"] < whole // 2 + 1000


def test_cost_and_bound() -> None:
    plan = planned()
    assert plan.cost == plan.prefill.cost + 7 * plan.decode.cost  # the first token comes from the prefill
    assert plan.bound <= plan.cost * (1 + 1e-9)
    assert plan.figures.tokens_per_s(plan.workload) == pytest.approx(4 / plan.decode.cost)


def test_seconds_of_a_program_that_is_launched_operator_by_operator() -> None:
    """As it runs, which is far slower where the host is: in the file beside what devices compute."""
    device = replace(EAGER.device, host_seconds=1e-3)
    cluster = replace(EAGER, device=device)
    plan = tapas.plan_serving(generating("llama"), mesh=2, cluster=cluster, baselines=False, **SERVED)
    launched, operators = plan.to_dict()["launched"], [op for op in plan.decode.operators if op.forward > 0]
    assert launched["token_seconds"] >= len(operators) * 1e-3 > 10 * plan.decode.cost
    assert launched["tokens_per_s"] == pytest.approx(4 / launched["token_seconds"])


def test_every_degree_of_tensor_parallelism() -> None:
    plan = planned()
    assert list(plan.degrees) == [1, 2]
    for figures in plan.degrees.values():
        assert not isinstance(figures, str)
        assert figures.total(plan.workload) >= plan.cost * (1 - 1e-9)


@pytest.mark.parametrize("options", [{"batch_split": False}, {}], ids=["tensor", "any"])
def test_a_step_that_decodes_gathers_no_weight(options: dict[str, Any]) -> None:
    """For a few tokens what a weight would cost on the way is far more than what they cost."""
    moves = planned(**options).decode.moves
    gathered = [step for m in moves if m.kind == "weight" for step in m.steps if step["forward"] in COLLECTIVES]
    assert gathered == []


@pytest.mark.full
def test_within_memory() -> None:
    """Layers may hold their weights in several ways; the other program does so, too, and ranks follow both."""
    model, free = generating("llama"), planned()
    limit = 0.8 * free.figures.nbytes
    plan = tapas.plan_serving(model, mesh=2, cluster=EAGER, memory=limit, baselines=False, **SERVED)
    assert plan.figures.nbytes <= limit and plan.weights < free.weights
    captured = captured_phases(generation_step(model, plan.workload))
    for phase, program in zip((plan.prefill, plan.decode), captured, strict=True):
        assert followed(phase, program.graph, fold(program.graph)).mesh == (2,)


def test_a_file(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "serve.json")
    again = tapas.load_serving_plan(tmp_path / "serve.json")
    assert again.to_dict() == json.loads(json.dumps(plan.to_dict()))
    assert again.figures == plan.figures


def test_files_that_are_none(tmp_path: Path) -> None:
    planned().prefill.save(tmp_path / "plan.json")
    with pytest.raises(TapasError, match="is no plan for serving"):
        tapas.load_serving_plan(tmp_path / "plan.json")
    with pytest.raises(TapasError, match="cannot be read"):
        tapas.load_serving_plan(tmp_path / "nothing.json")
    damaged = planned().to_dict() | {"degrees": {"two": {}}}
    (tmp_path / "damaged.json").write_text(json.dumps(damaged))
    with pytest.raises(TapasError, match="damaged"):
        tapas.load_serving_plan(tmp_path / "damaged.json")


def test_workloads_that_are_none() -> None:
    for wrong in ({"batch": 0}, {"prompt": 1}, {"new": 0}):
        with pytest.raises(TapasError, match="is not a number from"):
            tapas.plan_serving(generating("llama"), mesh=2, cluster=EAGER, **(SERVED | wrong))


def test_models_that_have_no_such_cache() -> None:
    import transformers as T

    sizes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    with pytest.raises(TapasError, match="is no model of transformers that generates"):
        tapas.plan_serving(T.BertModel(T.BertConfig(**sizes)), mesh=2, cluster=EAGER, **SERVED)
    mamba = T.MambaForCausalLM(T.MambaConfig(num_hidden_layers=1, hidden_size=32, vocab_size=50))
    with pytest.raises(TapasError, match="linear_attention, which is no cache"):
        tapas.plan_serving(mamba, mesh=2, cluster=EAGER, **SERVED)
    with torch.device("meta"):
        speech = T.SeamlessM4TForTextToText(tiny_config("seamless_m4t"))
    with pytest.raises(TapasError, match="has a `generate` of its own"):
        generation_step(speech, Workload(**SERVED))


@pytest.mark.full
def test_a_cache_has_the_shape_of_what_layers_add_to_it() -> None:
    """One head of keys and values, which no field of this configuration says by a name that others have."""
    import transformers as T

    config = T.FalconConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=50, multi_query=True)
    step = generation_step(T.FalconForCausalLM(config), Workload(**SERVED))
    for captured in captured_phases(step):
        shapes = {
            captured.graph.tensors[leaf.tensor].shape for leaf in captured.graph.leaves if is_cache("".join(leaf.paths))
        }
        assert shapes == {(4, 1, 14, 8)}


@pytest.mark.parametrize(("family", "words"), [
    ("fsmt", "makes no mask of all places of its cache"), ("mvp", "depend on values of position"),
])  # fmt: skip
def test_models_that_cannot_tell_which_places_are_filled(family: str, words: str) -> None:
    """They would continue with other tokens, or stop at the second one."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_config(tiny_config(family))
    with pytest.raises(TapasError, match=words):
        captured_phases(generation_step(model, Workload(**SERVED)))


def test_the_page() -> None:
    from tapas.report.frame import text_of
    from tapas.report.serving import serving_page

    text = text_of(serving_page(planned(batch_split=False)))
    assert "serving 4 prompts of 6 tokens, 8 new ones each" in text
    assert "model.layers.*.self_attn: heads over x" in text
    assert "first token after" in text and "tokens per second" in text
    assert "2, 1 replica " in text and "1, 2 replicas" in text
    assert "gradient" not in text.partition("In JSON")[0]
