"""Discovery: against the hand-written rules, against operators that are out to deceive it, and in plans."""

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tapas
from tapas.errors import TapasError
from tapas.plan.plan import plan_from_dict
from tapas.rules import found
from tapas.rules.base import At, Factor
from tapas.rules.choices import Choice, Option
from tapas.rules.notation import einsum
from tapas.sharding.layout import B, P, R, S
from tests.oracle.case import Case, floats
from tests.oracle.harness import Built, build, simulate
from tests.oracle.test_rules import CASES

Dims = tuple[int | None, ...]


def dims(factor: Factor) -> Dims:
    return tuple(None if at is None else at.dim for at in (*factor.operands, *factor.results))


def examined(case: Case) -> tuple[set[Dims], set[Dims]] | None:
    """The factors of the rule that need no kernel of ours, and what is found; all of that holds on the inputs of the
    case. None where discovery does not look: at random numbers, at nothing at all, and at constants that are sizes and
    would have to change with the parts."""
    built = build(case)
    rule = built.rule
    if rule.random or rule.local or not case.exact or not all(t.numel() for t in built.tensors):
        return None
    factors, _ = found.tried(built.call)
    split = einsum(factors, built.call).factors if factors else ()
    for factor in split:
        check(built, factor)
    offered = [factor for factor in rule.factors if not (factor.blocked or factor.kernel or factor.after)]
    return {dims(factor) for factor in offered}, {dims(factor) for factor in split}


def check(built: Built, factor: Factor) -> None:
    """Run on two and on three ranks: values and gradients are those of the whole."""

    def states(places: tuple[At | None, ...], absent: list) -> tuple:
        return tuple(S(at.dim) if at is not None else other for at, other in zip(places, absent, strict=True))

    operands = states(factor.operands, [B if t.differentiable else R for t in built.call.operands])
    results = states(factor.results, [P] * len(built.call.results))
    bare = replace(built, rule=replace(built.rule, kernel=None))
    for devices in (2, 3):
        if factor.size >= devices:
            simulate(bare, Choice((Option("?", operands, results),)), (devices,))


def share(cases: list[Case]) -> tuple[float, list[str]]:
    """Of the operators, how many have all their factors found in all cases; and those that have not."""
    complete: dict[str, bool] = defaultdict(lambda: True)
    for case in cases:
        if (pair := examined(case)) is not None:
            complete[case.target] &= pair[0] <= pair[1]
    missed = [target for target, whole in complete.items() if not whole]
    return 1 - len(missed) / len(complete), missed


@pytest.mark.filterwarnings("ignore")
def test_finds_what_rules_say_in_a_sample() -> None:
    found_share, missed = share(CASES[7::40])
    assert found_share >= 0.9, missed


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_finds_what_rules_say() -> None:
    """What it misses: dims that hold several tensors one after the other, or a product of which a part is whole."""
    found_share, missed = share(CASES)
    assert found_share >= 0.95, (found_share, missed)


# -- operators that would deceive it ---------------------------------------------------------------------------------


def operator(name: str, compute: Callable[..., Any], gradient: Callable[..., Any] | None = None) -> str:
    """An operator of one tensor; its gradient is autograd's unless one is given."""

    @torch.library.custom_op(f"tapas_tried::{name}", mutates_args=())
    def made(x: Tensor) -> Tensor:
        return compute(x.detach()).clone()

    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if gradient is not None:
            return gradient(x, g)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(compute(x), x, g)[0]

    made.register_fake(lambda x: compute(x))
    made.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return f"tapas_tried.{name}.default"


def far(x: Tensor) -> Tensor:
    """Looks at the neighbour 20 places away."""
    return x + torch.cat([torch.zeros_like(x[:, :20]), x[:, :-20]], 1) if x.shape[1] > 20 else x * 1


def sized(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] % 2 else x.softmax(1)


_calls = itertools.count()
DECEIVING = {
    "far": far,
    "sized": sized,
    "clipped": lambda x: x * 1 if x.abs().amax(1).max() < 50 else x / x.abs().amax(1, keepdim=True),  # large values
    "tied": lambda x: x + (x == x.amax(1, keepdim=True)).sum(1, keepdim=True).clamp(min=1) - 1,  # several largest ones
    "signs": lambda x: x * 1 if (x > 0).any() else x - x.mean(1, keepdim=True),  # where all are negative
    "random": lambda x: x + torch.randn_like(x),
    "counts": lambda x: x + next(_calls),
}
TARGETS = {name: operator(name, compute) for name, compute in DECEIVING.items()}
TARGETS["zero"] = operator("zero", torch.zeros_like, lambda x, g: g * 0)
TARGETS["centred"] = operator("centred", lambda x: x * 1, lambda x, g: g - g.mean(1, keepdim=True))  # only its gradient


@pytest.mark.parametrize("name", TARGETS)
def test_is_not_deceived(name: str) -> None:
    factors, _ = found.tried(build(Case(TARGETS[name], (floats(6, 48),))).call)
    assert factors in ("", "a 1 -> a 1")
    assert (factors == "") == (name in ("random", "counts", "zero", "clipped", "signs"))


def aborting(x: Tensor) -> Tensor:
    if x.shape[1] < 4:
        os.abort()
    return x * 2


def endless(x: Tensor) -> Tensor:
    while x.shape[0] == 5:
        time.process_time()
    return x * 2


ABORTING, ENDLESS = operator("aborting", aborting), operator("endless", endless)


def test_a_crash_is_one_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "CPU_SECONDS", 1)
    assert found.tried(build(Case(ABORTING, (floats(6, 8),))).call) == ("a 1 -> a 1", True)
    assert found.tried(build(Case(ENDLESS, (floats(6, 8),))).call) == ("", False)


# -- in plans ----------------------------------------------------------------------------------------------------------

SCALED = operator("scaled", lambda x: x * 3)


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clamp(-1, 1)


class Layers(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(8, 32), nn.Linear(32, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x))).square().mean()


@pytest.mark.parametrize("function", [torch.ops.tapas_tried.scaled, Clamped.apply], ids=["operator", "function"])
def test_plans_split_what_was_found(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, inputs = Layers(function), (torch.randn(4, 6, 8),)
    options: dict[str, Any] = {"mesh": 2, "pins": {"*": "megatron"}, "memory": None}
    plan = tapas.plan(model, inputs, **options)
    assert any("tried out, and splits as a b c -> a b c" in warning for warning in plan.warnings)
    ours = next(op for op in plan.operators if op.target.startswith("tapas"))
    assert ours.choice == ("c",) and not ours.missing_rule
    read = plan_from_dict(plan.to_dict())
    assert tapas.verify(model, inputs, plan=read, in_process=True, steps=2).ok
    whole = tapas.plan(model, inputs, discovery=False, **options)
    assert next(op for op in whole.operators if op.target.startswith("tapas")).choice in (("R",), ("B",))
    wrong = {**plan.to_dict()}
    wrong["assignment"] = {**wrong["assignment"], "found": [[key, "a -> a b"] for key, _ in plan.assignment.found]}
    with pytest.raises(TapasError, match="are not its factors"):
        tapas.verify(model, inputs, plan=plan_from_dict(wrong), in_process=True, steps=1)


def test_what_is_found_about_torch_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    call = build(Case("aten.special_log_ndtr.default", (floats(4, 6),))).call
    ours = build(Case(SCALED, (floats(4, 6),))).call
    assert found.eligible(call) and found.eligible(ours)
    for _ in range(2):
        monkeypatch.setattr(found, "_seen", {})
        assert set(found.find([call]).values()) == {"a b -> a b"}
        monkeypatch.setattr(found, "tried", lambda call: ("a 1 -> a 1", True))
    (kept,) = (tmp_path / "tapas" / "factors").iterdir()
    kept.write_text("{}")
    monkeypatch.setattr(found, "_seen", {})
    assert set(found.find([call, ours]).values()) == {"a 1 -> a 1"}  # a damaged file is nothing
    assert len(list(kept.parent.iterdir())) == 1  # what is ours may change
