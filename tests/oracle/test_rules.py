"""Every rule against its operator: whole run = combined sharded run, values and gradients."""

import importlib
import pkgutil
from typing import Any

import pytest
import torch

from tapas.rules.base import Rule, registered
from tests import oracle
from tests.oracle.case import floats, reseed
from tests.oracle.harness import MORE, Case, build, check, choices, offered
from tests.oracle.missing import forgotten

MODULES = [name for _, name, _ in pkgutil.iter_modules(oracle.__path__) if name.startswith("cases_")]


def cases_of(module: str) -> list[Case]:
    reseed()
    return importlib.import_module(f"tests.oracle.{module}").CASES


CASES: list[Case] = [case for name in MODULES for case in cases_of(name)]


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_sharded_equals_whole(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_more_combinations_of_two_axes(case: Case) -> None:
    if meshes := [mesh for mesh in case.meshes if len(mesh) > 1]:
        check(case, meshes, MORE)


def test_query_heads_alone_go_without_keys_that_are_split() -> None:
    """What is sent for these is counted by the heads' own factors, so there is no ring of them and no adding up."""
    heads = {"enable_gqa": True, "is_causal": True}, {"enable_gqa": True}
    for queries, options, frozen in ((6, heads[0], ()), (3, heads[1], (0, 1, 2))):
        operands = floats(2, 4, queries, 2), floats(2, 2, 6, 2), floats(2, 2, 6, 2)
        built = build(Case("aten.scaled_dot_product_attention.default", operands, options, frozen=frozen))
        together = [set(choice.names) for choice in choices(built.call, offered(built, (2, 2)), (2, 2))]
        assert any({"hq", "d0"} <= names for names in together)
        assert any({"kv", "s" if frozen else "ring"} <= names for names in together)
        assert not any("hq" in names and names & {"s", "ring"} for names in together)


# Recurrent operators have too many weights to try all splits of them, and with shapes that do not fit the
# fused cells of CPUs crash.
UNSAFE = tuple(f"aten.{name}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.id, marks=pytest.mark.full if i % 6 else ()) for i, c in enumerate(CASES)]
)
def test_nothing_is_forgotten(case: Case) -> None:
    if case.exact and not case.target.startswith(UNSAFE):
        assert forgotten(case) == set(case.known)


def test_every_rule_has_a_case() -> None:
    assert set(registered()) - {case.target for case in CASES} == set()


def _without_rule(target: str, *args: Any) -> Rule:
    found = build(Case(target, args)).rule
    assert found.missing
    return found


def test_work_of_operators_without_a_rule() -> None:
    """What torch can count is counted; the rest says that nobody knows."""
    x, window = floats(2, 3, 8, 8), floats(4, 3, 3, 3)
    conv = _without_rule("aten._convolution.default", x, window, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1,
                         False, False, False, False)  # fmt: skip
    assert (conv.flops, conv.unknown_work) == (2 * 2 * 4 * 6 * 6 * 27, False)
    weights = (floats(20, 3), floats(20, 5), floats(20), floats(20))
    states = (floats(1, 4, 5), floats(1, 4, 5))
    packed = _without_rule("aten.lstm.data", floats(9, 3), torch.tensor([4, 3, 2]), states, weights, True, 1, 0.0,
                           True, False)  # fmt: skip
    assert (packed.flops, packed.unknown_work) == (2 * 9 * 20 * (3 + 5), False)
    inverse = _without_rule("aten.linalg_inv_ex.default", floats(4, 4))
    assert (inverse.flops, inverse.unknown_work) == (0, True)


def test_work_of_recurrent_layers() -> None:
    """Every step, sample, layer and direction: a product with each of the matrices."""
    case = next(c for c in CASES if c.target == "aten.lstm.input" and c.args[4] == 2 and c.args[7])
    batch, steps, inner = case.args[0].shape
    rule = build(case).rule
    assert rule.flops * rule.factor("b").size == 2 * steps * batch * 2 * 4 * 5 * ((inner + 5) + (10 + 5))
