"""Experts that are dealt out to devices, in the words of transformers: only where its router does what is meant."""

import pytest
import torch
import transformers as T
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from tapas.capture import capture
from tapas.export.routers import find_routers
from tapas.export.sites import BY_EXPERT, NONE, Sites, split_of_module
from tapas.ir.fold import fold
from tapas.rules.choices import options
from tapas.rules.tiling import Divisibility, find_tilings
from tests.export.families import get
from tests.export.test_processes import exported
from tests.oracle.case import Case, floats, integers
from tests.oracle.harness import build

EXPERTS = "model.layers.*.mlp.experts"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_dealt_out(family: str) -> None:
    said = exported(family, "transformers", (2,)).data
    assert said["ep_size"] == said["tp_size"] == 2
    assert said["ep_plan"] == {
        f"{EXPERTS}.gate_up_proj": "grouped_gemm", f"{EXPERTS}.down_proj": "grouped_gemm", EXPERTS: "moe_tp_experts",
        "model.layers.*.mlp.gate": "ep_router",
    }  # fmt: skip
    config = T.DistributedConfig(**{key: value for key, value in said.items() if key not in ("notes", "dropped")})
    assert config.ep_size == 2


def test_experts_that_do_not_divide_are_split_inside() -> None:
    said = exported("three_experts", "transformers", (2,)).data
    assert "ep_plan" not in said and "ep_size" not in said
    assert said["tp_plan"][f"{EXPERTS}.gate_up_proj"] == "packed_colwise"


def test_nobody_else_sends_tokens() -> None:
    """Experts that are dealt out in both ways: only the sum over all experts is what transformers does."""
    mixture = (floats(6, 4), integers(6, 2, high=4), floats(6, 2), floats(4, 6, 4), floats(4, 4, 3), "silu")
    built, even = build(Case("tapas.experts.default", mixture)), Divisibility((2,))
    tilings = find_tilings([(built.op, built.call, built.rule)], even, set())[0][0]
    split = {option.name: option for option in options(built.rule, built.call, tilings, even)}
    assert split["e"].operands[3] == split["dispatch"].operands[3]  # their weights lie in the same way
    assert split_of_module("experts", split["e"], 2) == BY_EXPERT
    assert split_of_module("experts", split["dispatch"], 2) == NONE


class Telling(MixtralSparseMoeBlock):
    """One that uses the weights of the chosen experts once more: masked ones would change what it computes."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, numbers = self.gate(rows)
        mixed = self.experts(rows, numbers, weights) * (1 + weights.sum(-1, keepdim=True))
        return mixed.reshape(hidden_states.shape)


@pytest.mark.parametrize("telling", [False, True])
def test_a_router_is_known_by_who_reads_it(telling: bool) -> None:
    model, inputs = get("mixtral")
    for layer in model.model.layers if telling else ():
        layer.mlp.__class__ = Telling
    folded = fold(capture(model, inputs, training=True))
    found = find_routers(folded, Sites(folded, dict(model.named_modules())))
    assert found == ({} if telling else {"model.layers.0.mlp.experts": "model.layers.0.mlp.gate"})


def test_experts_that_are_packed_otherwise_have_no_style() -> None:
    """With biases, gate and up in turn, weights the other way round: nobody else splits these so."""
    from tests.distributed.small import small

    model, inputs = small("gpt_oss")
    folded = fold(capture(model, inputs))
    found = [op for block in folded.blocks for op in block.ops if op.target == "tapas.experts.default"]
    sites = Sites(folded, dict(model.named_modules()))
    assert found and all(sites.kind(op) == "" for op in found)
