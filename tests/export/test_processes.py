"""What is exported is run in the tool that it is for, on real ranks: outputs, gradients and three steps of training are
those of one rank."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import tapas
from tapas.export.exported import Exported
from tests.distributed.small import EAGER
from tests.export import ranks
from tests.export.families import get

FAMILIES = ("llama", "mixtral", "t5", "opt", "qwen3", "gpt2", "bert", "vit", "distilbert", "electra", "roberta", "bart",
            "gptj", "phi3", "three_experts", "qwen3_moe")  # fmt: skip
SINGLE = ("mixtral", "three_experts", "qwen3_moe")  # torch multiplies groups of rows in float32 at most


DEALT = ("mixtral", "qwen3_moe")  # whose experts are to be dealt out, and over links that leave everybody all tokens


@cache
def exported(family: str, to: str, mesh: tuple[int, ...]) -> Exported:
    model, inputs = get(family)
    asked: dict[str, Any] = {"mesh": mesh, "cluster": EAGER, "batch_split": len(mesh) > 1, "baselines": False}
    if family in DEALT:
        slow = replace(EAGER, intra=EAGER.intra.slowed(100), inter=EAGER.inter.slowed(100))
        asked |= {"cluster": slow, "pins": {"*.experts": f"[{', '.join(['*'] * (len(mesh) - 1) + ['e'])}]"}}
    return tapas.export(tapas.plan(model, inputs, **asked), to, model, inputs, approximate=True)


Case = tuple[str, str]  # family, format


def check(folder: Path, chosen: Sequence[Case], mesh: tuple[int, ...] = (2,)) -> None:
    cases: list[dict[str, Any]] = []
    expected: list[dict[str, Any]] = []
    for family, to in chosen:
        home = folder / f"{family}-{to}"
        home.mkdir()
        (home / "exported").write_text(exported(family, to, mesh).text)
        dtype = "float32" if family in SINGLE else "float64"
        model, inputs = get(family)
        model = model.to(getattr(torch, dtype))
        inputs = {k: v.to(getattr(torch, dtype)) if v.is_floating_point() else v for k, v in inputs.items()}
        model.save_pretrained(home)
        torch.save(inputs, home / "inputs.pt")
        data = mesh[0] if len(mesh) > 1 else 1
        cases.append({"name": home.name, "to": to, "class": type(model).__name__, "dtype": dtype, "data": data})
        expected.append(ranks.whole(model, inputs))
    found = ranks.run(folder, cases, torch.Size(mesh).numel())
    for case, one, many in zip(cases, expected, found, strict=True):
        same(case["name"], one, many, 1e-4 if case["dtype"] == "float32" else 1e-9)


def same(family: str, one: dict[str, Any], many: dict[str, Any], tolerance: float) -> None:
    assert "error" not in many, f"{family}: {many['error']}"
    for kind in ("outputs", "gradients"):
        assert many[kind].keys() <= one[kind].keys() and many[kind], family
        for name, value in many[kind].items():
            torch.testing.assert_close(
                value.to(one[kind][name].dtype), one[kind][name], rtol=tolerance, atol=tolerance,
                msg=lambda text, name=name: f"{family} {name}: {text}",
            )  # fmt: skip
    assert one["gradients"].keys() == many["gradients"].keys(), family
    assert many["losses"] == pytest.approx(one["losses"], rel=max(tolerance, 1e-6)), family  # some cast to float32
    assert len(many["losses"]) == 3 and many["losses"][2] < many["losses"][0], family


def test_tools_run_what_is_exported_for_them(tmp_path: Path) -> None:
    """One whose modules all can be split, one whose experts are dealt out, and one whose code insists on all heads."""
    check(tmp_path, [("llama", "transformers"), ("mixtral", "transformers"), ("opt", "torch")])


@pytest.mark.full
def test_transformers_runs_all_families(tmp_path: Path) -> None:
    check(tmp_path, [(family, "transformers") for family in FAMILIES])


@pytest.mark.full
def test_torch_runs_all_families(tmp_path: Path) -> None:
    check(tmp_path, [(family, "torch") for family in FAMILIES])


@pytest.mark.full
def test_the_batch_may_be_split_as_well(tmp_path: Path) -> None:
    chosen = [("qwen3", "transformers"), ("llama", "transformers"), ("llama", "torch"), ("bert", "torch")]
    check(tmp_path, [*chosen, ("t5", "torch"), ("vit", "torch"), ("qwen3", "torch")], (2, 2))
