"""Plans of other tools as pins."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tapas.errors import PlanError
from tapas.export.foreign import check_styles, with_foreign
from tapas.planner.request import Request
from tests.distributed.small import EAGER

OWN = {"model.layers.*.mlp.up_proj": "colwise"}


def asked(mesh: tuple[int, ...] = (2,)) -> Request:
    return Request.of(mesh, EAGER)


def written(folder: Path, data: Any) -> str:
    (folder / "plan.json").write_text(json.dumps(data))
    return str(folder / "plan.json")


def test_every_plan_that_transformers_ships_is_understood() -> None:
    """Of all configurations, nested ones included: each entry is a style that is known."""
    plans = 0
    for kind in set(transformers.CONFIG_MAPPING.values()):
        for name in ("base_model_tp_plan", "base_model_ep_plan"):
            if plan := getattr(kind, name, None):
                check_styles(plan, f"{kind.__name__}.{name}")
                plans += 1
    assert plans > 138


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
