"""Parts of attention: plain products where no fused kernel takes them, and half precision."""

from typing import Any

import pytest
import torch

from tapas.rules.choices import Choice
from tapas.runtime.kernels import partial_attention
from tapas.runtime.kernels.partial_attention import attend, attend_back
from tests.oracle.case import Case, floats
from tests.oracle.harness import build, offered, simulate

ATTENTION = "aten.scaled_dot_product_attention.default"


def parts(**how: Any) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    shapes = (2, 6, 5, 4), (2, 2, 5, 4), (2, 2, 5, 3), (2, 6, 5, 3)
    return tuple(torch.randn(shape, **how) for shape in shapes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("counts", [[3, 3], [1, 5]], ids=str)
def test_fused_and_plain_are_the_same(causal: bool, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, gradient = parts(dtype=torch.float64)
    found = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(partial_attention, "fused_attention", lambda *_: None)
            monkeypatch.setattr(partial_attention, "fused_attention_backward", lambda *_: None)
        out, lse = attend(q, k, v, causal, 0.3, counts)
        found.append((out, lse, *attend_back(gradient, q, k, v, out, lse, causal, 0.3, counts)))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"enable_gqa": True}], ids=str)
def test_rings_of_plain_parts(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_attention, "fused_attention", lambda *_: None)
    monkeypatch.setattr(partial_attention, "fused_attention_backward", lambda *_: None)
    heads = 3 if "enable_gqa" in options else 6
    built = build(Case(ATTENTION, (floats(2, 6, 5, 2), floats(2, heads, 5, 2), floats(2, heads, 5, 2)), options))
    (ring,) = [option for option in offered(built, (3,)) if option.name == "ring"]
    simulate(built, Choice((ring,)), (3,))


def test_half_precision() -> None:
    """Results are rounded, logarithms and sums of gradients are not."""
    q, k, v, gradient = parts()
    counts = [3, 3]
    wanted = attend(q, k, v, True, 0.3, counts)
    wanted += attend_back(gradient, q, k, v, *wanted, True, 0.3, counts)
    q, k, v, gradient = (x.bfloat16() for x in (q, k, v, gradient))
    made = attend(q, k, v, True, 0.3, counts)
    made += attend_back(gradient, q, k, v, *made, True, 0.3, counts)
    assert [x.dtype for x in made] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.float32]
    for one, two in zip(made, wanted, strict=True):
        assert 0 < float((one.float() - two).norm() / two.norm()) < 0.02
