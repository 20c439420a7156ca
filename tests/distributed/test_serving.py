"""`generate` on ranks gives the tokens of one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import tapas
from tapas.errors import TapasError
from tests.distributed.parallel import mesh_of
from tests.distributed.pool import Pool
from tests.distributed.small import EAGER
from tests.serving.models import FAMILIES, generating, prompts

Sizes = tuple[int, ...]


def generated(rank: int, family: str, shape: Sizes, plan: str, new: int) -> list[bool]:
    """Whether all ways to ask for tokens give those of one device."""
    mesh = mesh_of(shape)
    if mesh.get_coordinate() is None:
        return []
    model = generating(family)
    served = tapas.serve(model, mesh=mesh, plan=plan)
    assert all(isinstance(parameter, DTensor) for parameter in served.module.parameters())
    found: list[bool] = []
    for batch, length in ((4, 6), (3, 4)):  # as planned, and less than that
        given = prompts(family, batch, length)
        for asked in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 20}):
            options: dict[str, Any] = {**given, **asked, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
            tokens = []
            for generator in (model, served):
                torch.manual_seed(7)
                tokens.append(generator.generate(**options))
            found.append(torch.equal(*tokens))
    return found


ATTENTION = {
    "llama": ["*.self_attn"], "gpt2": ["*.attn"], "qwen3": ["*.self_attn"], "mixtral": ["*.self_attn"],
    "t5": ["*.SelfAttention", "*.EncDecAttention"], "bart": ["*.self_attn", "*.encoder_attn"],
}  # fmt: skip
PLACES = {1: "[s]", 2: "[batch, s]"}


def planned(family: str, shape: Sizes, new: int, path: Path, places: bool = False) -> str:
    """For the heads of the cache to be split over the last axis, or its places."""
    options: dict[str, Any] = {"batch_split": False} if len(shape) == 1 else {"pins": {"*": "megatron"}}
    if places:
        options = {"pins": {pattern: PLACES[len(shape)] for pattern in ATTENTION[family]}}
    plan = tapas.plan_serving(
        generating(family), mesh=shape, cluster=EAGER, batch=4, prompt=6, new=new, baselines=False, **options
    )
    assert all(layout[-1] == ("S(2)" if places else "S(1)") for layout in plan.cache_layouts.values())
    plan.save(path)
    return str(path)


@pytest.mark.parametrize("family", ["llama", "quantised"])
def test_llama(pool: Pool, tmp_path: Path, family: str) -> None:
    plan = planned(family, (2, 2), 6, tmp_path / "plan.json")
    assert pool(generated, family, (2, 2), plan, 6) == [[True] * 4] * 4


@pytest.mark.parametrize(
    ("family", "shape", "new"),
    [
        ("llama", (2, 2), 6),
        *[
            pytest.param(family, shape, 32, marks=pytest.mark.full)
            for family in ATTENTION for shape in ((2,), (2, 2), (4,))
        ],
    ],
)  # fmt: skip
def test_places_dealt_out(pool: Pool, tmp_path: Path, family: str, shape: Sizes, new: int) -> None:
    """Each rank holds some places of the cache, and looks at these only."""
    plan = planned(family, shape, new, tmp_path / "plan.json", places=True)
    answers = pool(generated, family, shape, plan, new)
    assert answers == [[True] * 4 if rank < torch.Size(shape).numel() else [] for rank in range(4)]


@pytest.mark.full
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["2", "2x2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_one_device(pool: Pool, tmp_path: Path, family: str, shape: Sizes) -> None:
    plan = planned(family, shape, 32, tmp_path / "plan.json")
    answers = pool(generated, family, shape, plan, 32)
    assert answers == [[True] * 4 if rank < torch.Size(shape).numel() else [] for rank in range(4)]


def unlike_seeds(rank: int) -> str:
    mesh = mesh_of((2,))
    if mesh.get_coordinate() is None:
        return ""
    served = tapas.serve(generating("llama"), mesh=mesh, cluster=EAGER, batch=2, prompt=4, new=3)
    torch.manual_seed(rank)
    with pytest.raises(TapasError) as error:
        served.generate(torch.ones(2, 4, dtype=torch.long), do_sample=True)
    return error.value.fact


@pytest.mark.full
def test_ranks_that_would_draw_other_tokens(pool: Pool) -> None:
    fact = "ranks would draw different tokens: their random numbers differ"
    assert pool(unlike_seeds) == [fact, fact, "", ""]
