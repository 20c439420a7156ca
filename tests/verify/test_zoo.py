"""A small sample of the zoo: it is planned and verified, what stops the others is told, and a run goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tapas.capture import capture
from tapas.errors import TapasError
from tapas.models.tiny_trials import tiny_model
from tapas.verify.tensor_share import tensor_share
from tapas.verify.verification import verify_model
from tapas.verify.zoo import ZooRow, all_types, examine_type, examined, run_zoo
from tapas.verify.zoo_page import shares, zoo_text


@pytest.mark.parametrize("name", [pytest.param("llava", marks=pytest.mark.full), "bert"])
@pytest.mark.filterwarnings("ignore")
def test_a_type_is_verified(name: str) -> None:
    row = examine_type(name)
    assert (row.outcome, row.why) == ("verified", ""), row
    assert row.tensor_share is not None and row.tensor_share > 0.9
    if name == "llava":
        assert any("get_placeholder_mask" in note for note in row.notes)


@pytest.mark.full
@pytest.mark.parametrize("name", ["detr", "time_series_transformer", "deepseek_v3", "qwen2_vl"])
@pytest.mark.filterwarnings("ignore")
def test_types_that_need_more(name: str) -> None:
    """A matching of boxes and a clamp that depend on activations, and small configurations that are hard to make."""
    row = examine_type(name)
    assert (row.outcome, row.why) == ("verified", ""), row
    assert name != "detr" or sum("stays whole" in note for note in row.notes) == 3


@pytest.mark.filterwarnings("ignore")
def test_other_configurations_and_inputs_are_tried() -> None:
    """A part of others' that takes rows of patches, and one whose rotations have sections."""
    tower, inputs = tiny_model("qwen2_vl_vision")
    assert type(tower).__name__ == "Qwen2VisionTransformerPretrainedModel" and inputs["hidden_states"].dim() == 2
    model, _ = tiny_model("glm_image_text")
    assert model.config.rope_parameters["mrope_section"] == [2, 1, 1]
    model, _ = tiny_model("dots1")  # which says by default neither how many experts there are nor how many are taken
    assert (model.config.n_routed_experts, model.config.num_experts_per_tok) == (4, 2)
    _, inputs = tiny_model("blip_2_qformer")  # and one that takes more than it requires
    assert {"query_embeds", "encoder_hidden_states"} <= inputs.keys()


@pytest.mark.filterwarnings("ignore")
def test_parts_of_a_small_model_fit_together() -> None:
    """Backbones of as many stages as the rest reads, windows that the last stage has room for, tokens of images."""
    for name in ("swin", "upernet", "rt_detr", "depth_anything", "blip-2"):
        model, inputs = tiny_model(name)
        assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000, name
        assert inputs["pixel_values"].shape[-1] <= 64
    config: Any = tiny_model("depth_anything")[0].config
    assert len(config.backbone_config.out_features) == len(config.neck_hidden_sizes)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_what_says_that_it_has_no_loss_gets_no_labels() -> None:
    _, inputs = tiny_model("lightglue")
    assert "labels" not in inputs


class Read(nn.Module):
    """One product that splits, and numbers that a sort along their only dim reads."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.unread = nn.Linear(8, 6, bias=False), nn.Parameter(torch.zeros(100))
        self.sorted = nn.Parameter(torch.arange(12.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x).sum() + self.sorted.sort()[0].square().sum()


def test_what_tensor_parallelism_splits() -> None:
    model = Read()
    graph = capture(model, (torch.randn(4, 8),))
    found = tensor_share(graph, "2")
    assert found.share == 0.8 and len(found.whole) == 1  # 48 of 60 numbers that are read
    assert found.whole[0].startswith("sorted: read whole by aten.sort.default, none of its factors")
    assert verify_model(model, (torch.randn(4, 8),), found.plan, in_process=True, steps=1).ok


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_built_says_why() -> None:
    row = examine_type("bridgetower_vision_model")
    assert row.outcome == "unbuilt" and "no model with a known task" in row.why


def test_results_are_kept_and_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "zoo.jsonl"
    path.write_text(json.dumps({"type": "bert", "outcome": "refused", "why": "a reason | of two parts"}) + "\n")
    told: list[ZooRow] = []
    rows = run_zoo(["bert", "no-such-type"], path, 1, 60, told.append)
    assert [row.type for row in told] == ["no-such-type"] and told[0].outcome in ("unbuilt", "crash")
    assert examined(path) == rows and shares(rows.values())["planned"] == 0
    assert "| bert |  | a reason / of two parts |" in zoo_text(rows.values())
    path.write_text("nonsense\n")
    with pytest.raises(TapasError, match="not a result"):
        examined(path)


def test_a_reason_is_told_once_on_the_page() -> None:
    whole = [f"blocks.{n}.norm.weight: read whole" for n in range(9)] + [f"{name}: read whole" for name in "abcd"]
    page = zoo_text([ZooRow("bert", "verified", whole=tuple(whole))])
    assert "| blocks.*.norm.weight, a, b and 2 more: read whole |" in page


def test_there_are_hundreds_of_types() -> None:
    assert len(all_types()) > 400
