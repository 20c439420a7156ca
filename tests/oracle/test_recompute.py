"""What selective recomputation runs again, counted under torch's own: a rule's products once, all else twice."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tapas.rules.base import SELECTIVE, rule_for
from tapas.runtime.calls import Recomputed, recomputable
from tapas.runtime.draws import Draws
from tests.oracle.case import Case, floats, integers
from tests.oracle.harness import Built, build, call_function
from tests.oracle.test_rules import CASES

PRODUCTS = frozenset(target for case in CASES for target in build(case).rule.products)


class _Count(TorchDispatchMode):
    """Counts what runs while a block is at work, not what its backward pass does."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Counter[str]] = []
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside:
            self.runs[-1][str(func)] += str(func) != "aten.detach.default"  # the checkpoint does so, too
        return func(*args, **(kwargs or {}))


class _Block(nn.Module):
    def __init__(self, built: Built, count: _Count) -> None:
        super().__init__()
        self.built, self.count = built, count

    def forward(self, *tensors: torch.Tensor) -> Any:
        self.count.runs.append(Counter())
        self.count.inside = True
        call, rule = self.built.call, self.built.rule
        called = partial(call_function, rule.target or call.target, call.args, call.kwargs)
        found = recomputable(called, rule)(tensors)
        self.count.inside = False
        return [x * 1 if x.requires_grad else x for x in found]  # torch recomputes only what is asked for


def runs(built: Built) -> tuple[Counter[str], Counter[str]]:
    """What ran in the forward pass, and what again in the backward pass."""
    count = _Count()
    with count:
        results = Recomputed(_Block(built, count), SELECTIVE, PRODUCTS, Draws())(*built.tensors)
        torch.autograd.backward([(r * r).sum() for r in results if r.is_floating_point() and r.requires_grad])
    return count.runs[0], sum(count.runs[1:], Counter())


def trained(case: Case) -> bool:
    return case.exact and any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in case.args)


WORK = [case for case in CASES if trained(case) and (build(case).rule.products or build(case).rule.flops)]


@pytest.mark.parametrize("case", WORK, ids=[case.id for case in WORK])
def test_products_run_once(case: Case) -> None:
    built = build(case)
    if built.gradients and not any(g is not None for g in built.gradients):
        pytest.skip("nothing to train")
    first, again = runs(built)
    products = frozenset(built.rule.products)
    assert bool(products & first.keys()) == bool(products), f"{first} has none of {products}"
    assert not products & again.keys()
    if not products:
        assert again - first == first - again == Counter()


def test_experts_run_once() -> None:
    """The operator of a whole expert layer, which no list of torch's products names."""
    hidden, index, weight = floats(6, 8), integers(6, 2, high=4), floats(6, 2)
    args = (hidden, index, weight, floats(4, 10, 8), floats(4, 8, 5), "silu")
    built = build(Case("tapas.experts.default", args))
    first, again = runs(built)
    product = rule_for(built.call).products[0]
    assert (first[product], again[product]) == (1, 0)


def test_what_is_no_product_runs_twice() -> None:
    for target in ("aten.gelu.default", "aten.exp.default"):
        first, again = runs(build(Case(target, (floats(4, 6),))))
        assert first[target] == again[target] == 1
