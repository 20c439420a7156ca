"""Plans of other tools as pins."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tapas.capture import capture
from tapas.errors import PlanError, TapasError
from tapas.export.foreign import check_styles, with_foreign
from tapas.ir.graph import Graph
from tapas.models.tiny_trials import tiny_model
from tapas.planner.pipeline import plan_graph, tp_hints
from tapas.planner.request import Request
from tests.distributed.small import EAGER

OWN = {"model.layers.*.mlp.up_proj": "colwise"}


def asked(mesh: tuple[int, ...] = (2,)) -> Request:
    return Request.of(mesh, EAGER)


def written(folder: Path, data: Any) -> str:
    (folder / "plan.json").write_text(json.dumps(data))
    return str(folder / "plan.json")


def understood(kinds: Iterable[Any]) -> int:
    """How many plans configurations ship, of which every entry is a style that is known."""
    plans = 0
    for kind in kinds:
        for name in ("base_model_tp_plan", "base_model_ep_plan"):
            if plan := getattr(kind, name, None):
                check_styles(plan, f"{kind.__name__}.{name}")
                plans += 1
    return plans


def test_plans_that_transformers_ships_are_understood() -> None:
    names = ("llama", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "phi3", "gemma3_text")
    assert understood(transformers.CONFIG_MAPPING[name] for name in names) > len(names)


@pytest.mark.full
def test_every_plan_that_transformers_ships_is_understood() -> None:
    """Of all configurations, nested ones included; importing them takes longest."""
    assert understood(set(transformers.CONFIG_MAPPING.values())) > 138


def test_an_entry_that_is_not_understood_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, {"model.layers.*.mlp.up_proj": "diagonal"})
    with pytest.raises(PlanError, match=r"model.layers.\*.mlp.up_proj is diagonal, which is no style"):
        with_foreign(asked(), file, OWN)


def test_a_tp_plan_is_merged_over_the_models_own(tmp_path: Path) -> None:
    file = written(tmp_path, {"tp_size": 2, "tp_plan": {"lm_head": "colwise_gather_output"}})
    request = with_foreign(asked(), file, OWN)
    assert dict(request.tp_plan) == OWN | {"lm_head": "colwise_gather_output"}
    assert request.pins == (("*", "hf"),)
    assert Request.from_dict(request.to_dict(), request.mesh, request.cluster).tp_plan == request.tp_plan


def test_placements_of_all_layers_are_one_pin(tmp_path: Path) -> None:
    def said(*texts: str) -> dict[str, Any]:
        return {"shape": [8, 8], "placements": list(texts)}

    parameters = {f"layers.{i}.up.weight": said("Shard(0)") for i in range(3)} | {"norm.weight": said("Replicate()")}
    parameters |= {f"layers.{i}.down.weight": said(f"Shard({i % 2})") for i in range(2)}
    data = {"format": "dtensor-placements", "mesh": {"sizes": [2]}, "parameters": parameters}
    pins = dict(with_foreign(asked(), written(tmp_path, data), None).pins)
    assert pins == {
        "layers.*.up.weight": "[S(0)]", "norm.weight": "[R]", "layers.0.down.weight": "[S(0)]",
        "layers.1.down.weight": "[S(1)]",
    }  # fmt: skip


def test_megatrons_degrees(tmp_path: Path) -> None:
    degrees = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert with_foreign(asked((2, 2)), written(tmp_path, degrees), None).pins == (("*", "megatron-sp"),)
    with pytest.raises(PlanError, match="pipeline_model_parallel_size is 4"):
        with_foreign(asked(), written(tmp_path, degrees | {"pipeline_model_parallel_size": 4}), None)
    with pytest.raises(PlanError, match="the last axis of the mesh has 4 devices"):
        with_foreign(asked((4,)), written(tmp_path, degrees), None)


@pytest.mark.parametrize(
    ("data", "fact"),
    [([1], "is not a table"), ({"a": 1}, "is none of the plans"), ({"format": "dtensor-placements"}, "is for a mesh")],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, data: Any, fact: str) -> None:
    with pytest.raises(PlanError, match=fact):
        with_foreign(asked(), written(tmp_path, data), OWN)
    with pytest.raises(PlanError, match="no such file"):
        with_foreign(asked(), str(tmp_path / "none.json"), OWN)
    with pytest.raises(PlanError, match="brings no tp_plan"):
        with_foreign(asked(), "transformers", None)


def test_an_entry_that_matches_nothing_is_named(tmp_path: Path) -> None:
    """transformers passes over it; a price that left it out would be another plan's."""
    names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(2) for part in ("up", "down")]
    file = written(tmp_path, {"model.layers.*.mlp.upp_proj": "colwise"})
    with pytest.raises(PlanError, match=r"upp_proj matches no parameter .* did you mean model.layers.\d.mlp.up_proj"):
        with_foreign(asked(), file, OWN, names)
    for harmless in ({"model.layers.*.mlp.up_proj": "rowwise"}, {"nowhere": "replicate"}):
        with_foreign(asked(), written(tmp_path, harmless), OWN, names)


# ---------------------------------------------------------------------- every plan that transformers ships, priced


def never_costlier(model_type: str) -> str:
    """What came of importing a type's own plan: `priced`, after our own plan was held against it, or why not."""
    try:
        model, inputs = tiny_model(model_type)
    except Exception as error:  # whatever a small configuration is not good enough for: that is the zoo's to say
        return f"not made: {error}"
    hints = tp_hints(model)
    if not hints:
        return "no plan"
    try:
        graph = capture(model, inputs)
    except TapasError as error:
        return f"not captured: {error}"
    request = Request.of("2", EAGER, baselines=False, memory=None, batch_split=False)
    try:
        imported = plan_graph(graph, with_foreign(request, "transformers", hints, parameters_of(graph)), hints)
    except PlanError as error:
        assert any(key in str(error) for key in hints), f"{model_type}: {error}"
        return f"refused: {error}"
    best = plan_graph(graph, request, hints)
    assert best.cost <= imported.cost * (1 + 1e-9), f"{model_type}: {best.cost} > {imported.cost}"
    return "priced"


def parameters_of(graph: Graph) -> list[str]:
    return [path for leaf in graph.parameters() for path in leaf.paths]


def test_our_plan_is_never_costlier_than_the_models_own() -> None:
    assert never_costlier("qwen3") == "priced"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # small models of all types: what they warn of is theirs
def test_of_all_types_our_plan_is_never_costlier() -> None:
    found = {name: never_costlier(name) for name, kind in transformers.CONFIG_MAPPING.items() if brings_a_plan(kind)}
    assert sum(outcome == "priced" for outcome in found.values()) > 80, found


def brings_a_plan(kind: Any) -> bool:
    """A configuration, or a part of it, has a tp_plan."""
    try:
        config = kind()
    except Exception:  # some have no defaults: their model says
        return True
    parts = [config, *(part for part in vars(config).values() if hasattr(part, "to_diff_dict"))]
    return any(getattr(part, "base_model_tp_plan", None) for part in parts)
