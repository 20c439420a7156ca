"""A rank's program launches no more than the original does: kernels, copies, reads by the host, fused attention.

What a step takes on a GPU is not known here, but what it launches is: none of this depends on the device.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tapas
from tapas.runtime.calls import dense_rows
from tests.distributed.small import EAGER
from tests.faithful.ranks import thread_groups
from tests.faithful.run import captured_once
from tests.runtime.families import FAMILIES, Subject, family
from tests.runtime.launches import Launched, launched

# DeBERTa's code scripts functions when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

# What ours may launch that the original does not.
EXPERTS = Counter(
    {"experts_forward": 2, "experts_backward": 2}
)  # of two layers: one operator of our own for many of torch's
EXCEPTIONS = {"mixtral": EXPERTS}
QUICK = ("llama", "gpt2", "gpt2_dropout", "bert_masked", "t5", "vit", "mixtral", "resnet", "swin", "gemma3")
SPLIT = {"batch": {"*": "ddp"}, "tensor": {"*": "megatron"}}
QUICK_SPLIT = {("llama", "tensor"), ("llama_masked", "batch"), ("swin", "batch"), ("t5", "tensor"), ("gpt2", "tensor")}
ATTENDING = [name for name in FAMILIES if name not in ("resnet", "wide_resnet", "deberta", "gpt2_dropout")]


@pytest.fixture(scope="module", autouse=True)
def _captured() -> Iterator[None]:
    with captured_once():
        yield


@cache
def subject(name: str) -> Subject:
    return family(name)


@cache
def of_original(name: str) -> Launched:
    return launched(*subject(name))


def on_ranks(name: str, mesh: tuple[int, ...], **asked: Any) -> list[Launched]:
    model, inputs = subject(name)

    def work(device_mesh: DeviceMesh) -> Launched:
        ours: nn.Module = tapas.parallelize(model, inputs, mesh=device_mesh, cluster=EAGER, memory=None, **asked)
        return launched(ours, inputs)

    with thread_groups() as ranks, torch.random.fork_rng(devices=[]):
        return ranks(mesh)(work)


def _some(quick: bool, *values: str):
    return pytest.param(*values, marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize("name", [_some(name in QUICK, name) for name in FAMILIES])
def test_one_rank_launches_what_the_original_does(name: str) -> None:
    theirs, (ours,) = of_original(name), on_ranks(name, (1,))
    assert ours.kernels - EXCEPTIONS.get(name, Counter()) <= theirs.kernels
    assert ours.fused() == theirs.fused() and ours.attention == theirs.attention
    assert ours.loss == pytest.approx(theirs.loss, rel=0.05 if name == "gpt2_dropout" else 1e-5)


@pytest.mark.parametrize(
    ("name", "split"), [_some((name, split) in QUICK_SPLIT, name, split) for name in ATTENDING for split in SPLIT]
)
def test_attention_stays_fused_where_it_is_split(name: str, split: str) -> None:
    theirs = of_original(name)
    for ours in on_ranks(name, (2,), pins=SPLIT[split]):
        assert ours.fused() == theirs.fused() and len(ours.attention) == len(theirs.attention)
        for mine, call in zip(ours.attention, theirs.attention, strict=True):
            assert mine.dense and call.dense
            assert (mine.masked, mine.causal, mine.shared) == (call.masked, call.causal, call.shared)
            assert mine.mask_nbytes <= call.mask_nbytes


def test_keys_are_not_repeated_for_fewer_heads_than_ranks() -> None:
    """Each rank takes the head of its queries, which share it."""
    theirs = of_original("llama_shared")
    for ours in on_ranks("llama_shared", (4,), pins=SPLIT["tensor"]):
        assert ours.attention == theirs.attention and all(call.shared for call in ours.attention)
        assert ours.kernels["index_select"] == theirs.kernels["index_select"]


def test_rows_are_copied_only_if_they_are_strided() -> None:
    x = torch.randn(6, 5)
    assert dense_rows(x) is x
    turned = torch.randn(1, 6, 5, 2).permute(0, 3, 1, 2).expand(7, 2, 6, 5)
    assert dense_rows(turned).stride() == (0, 30, 5, 1) and torch.equal(dense_rows(turned), turned)
    wide = torch.randn(5, 4, 1).expand(5, 4, 3)
    assert dense_rows(wide).stride(-1) == 1 and torch.equal(dense_rows(wide), wide)
