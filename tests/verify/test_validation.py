"""Rank 0 alone: what it computes and holds, against the plan."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tapas.cli.main import app
from tapas.verify.alone import SilentAxis
from tapas.verify.validation import PACKING, place

SMALL = [
    "--set", "num_hidden_layers=2", "--set", "hidden_size=64", "--set", "intermediate_size=128", "--set",
    "num_attention_heads=4", "--set", "num_key_value_heads=2", "--set", "vocab_size=256", "--batch", "4", "--seq", "16",
    "--dtype", "float32", "--no-master",
]  # fmt: skip


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["validate", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_rank_0_is_measured_beside_its_plan() -> None:
    code, text, errors = run("hf:llama", "--mesh", "2x2", "--pin", "*=megatron-sp", *SMALL, "--rounds", "2", "--json")
    assert code == 0, errors
    found = json.loads(text)
    assert found["memory"]["planned"] == pytest.approx(found["memory"]["measured"], rel=0.1)
    assert found["passes"]["measured"] > 0 and found["update"]["measured"] > 0
    families = {row["name"]: row for row in found["families"]}
    assert {"matmul", "attention", "pointwise", "cross_entropy"} <= families.keys()
    for name, row in families.items():  # every family that is planned for was seen, and the other way round
        assert row["measured"] > 0 and (row["planned"] > 0 or name == PACKING), name
    places = {row["name"] for row in found["places"] if row["planned"]}
    assert places == {"model.embed_tokens", "model.layers.*", "model.norm", "lm_head", "model"}
    assert not torch.distributed.is_initialized()


def test_a_plan_is_followed_or_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    arguments = ["hf:llama", "--mesh", "2", *SMALL, "--no-baselines", "-o", str(plan)]
    assert CliRunner().invoke(app, ["plan", *arguments]).exit_code == 0
    code, text, errors = run(str(plan), "--rounds", "1")
    assert code == 0, errors
    assert "the first rank of 2 on cpu" in " ".join(text.split())
    data = json.loads(plan.read_text())
    data["source"]["pins"] = [["*", "megatron"]]  # what was asked for is something else now
    plan.write_text(json.dumps(data))
    code, _, errors = run(str(plan), "--rounds", "1")
    assert code == 2
    assert "this is not the plan that is found" in errors


def test_what_is_no_device_is_refused() -> None:
    code, _, errors = run("hf:llama", "--mesh", "2", "--device", "tpu")
    assert code == 2
    assert "--device tpu: is not known" in errors


def test_what_would_arrive_has_its_shape() -> None:
    axis, x = SilentAxis(3), torch.randn(6, 2)
    assert axis.all_reduce(x).shape == x.shape
    assert axis.all_gather(x).shape == (18, 2)
    assert axis.reduce_scatter(x).shape == (2, 2)
    assert axis.all_to_all(x, [2, 2, 2], [3, 3, 3]).shape == (9, 2)


@pytest.mark.parametrize(
    ("module", "expected"),
    [("model.layers.3.mlp", "model.layers.*"), ("lm_head", "lm_head"), ("", "model"), ("0.weight", "*")],
)
def test_places(module: str, expected: str) -> None:
    assert place(module) == expected
