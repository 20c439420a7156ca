"""Models with quantised weights: equal to the original, bytes and memory as planned."""

from typing import Any

import pytest
import torch
from torch import nn

import tapas
from tapas.errors import PlanError
from tests.distributed.small import EAGER
from tests.quantised import Int4Linear, Int8Linear, PackedLinear, quantised_llama

MEGATRON = {"pins": {"*": "megatron"}}


def asked(adapters: bool) -> dict[str, Any]:
    ids = torch.randint(0, 50, (4, 8))
    return {"input_ids": ids, "labels": ids.clone()} if adapters else {"input_ids": ids, "use_cache": False}


@pytest.mark.parametrize(("kind", "adapters", "mesh", "options"), [
    (Int4Linear, False, (2,), MEGATRON), (Int8Linear, True, (2, 2), MEGATRON),
    pytest.param(PackedLinear, True, (2, 2), MEGATRON, marks=pytest.mark.full),
    pytest.param(Int4Linear, True, (2, 2), MEGATRON, marks=pytest.mark.full),
    pytest.param(Int8Linear, False, (2, 2), {"pins": {"*": "fsdp"}}, marks=pytest.mark.full),
])  # fmt: skip
def test_a_llama(kind: type[nn.Module], adapters: bool, mesh: tuple[int, ...], options: dict[str, Any]) -> None:
    """Frozen weights, and adapters beside them that are trained; without gradients, all of it."""
    model, inputs = quantised_llama(kind, adapters), asked(adapters)
    plan = tapas.plan(model, inputs, mesh=mesh, cluster=EAGER, baselines=False, **options)
    assert any(path.endswith(".q") for path in plan.parameters)
    report = tapas.verify(model, inputs, plan=plan, in_process=True)
    assert report.ok and all(sent.predicted_nbytes == sent.executed_nbytes for s in report.sent.values() for sent in s)
    # small tables of groups make constants as large as weights: an operator that reads one counts it again
    near = 0.35 if kind is PackedLinear else 0.15
    for used in report.memory.values():
        assert used.predicted_nbytes == pytest.approx(used.measured_nbytes, rel=near)


def test_pins() -> None:
    """By its name, as a parameter; not so a buffer that is none."""
    model, inputs = Int8Linear(64, 128), (torch.randn(4, 64),)
    plan = tapas.plan(model, inputs, mesh=(2,), cluster=EAGER, baselines=False, pins={"q": "S(1)"})
    assert plan.parameters == {"q": ["S(1)"]}
    with pytest.raises(PlanError, match="scale is a buffer that every device has whole"):
        tapas.plan(model, inputs, mesh=(2,), cluster=EAGER, baselines=False, pins={"scale": "S(0)"})


def test_columns_and_rows_send_one_sum() -> None:
    """No weight is sent, packed or not: bytes and groups stay together in both splits."""
    model = quantised_llama(Int4Linear)
    plan = tapas.plan(model, asked(False), mesh=(2,), cluster=EAGER, baselines=False, **MEGATRON)
    stored = {path.split(".")[-2]: layout for path, layout in plan.parameters.items() if path.endswith(".q")}
    assert all(stored[name] == ["S(0)"] for name in ("gate_proj", "up_proj"))
    assert stored["down_proj"] == ["S(1)"]
    assert not [move for move in plan.moves if move.tensor.endswith((".q", ".scale", ".zero"))]
