"""A handful of the cases on real processes; and those that draw random numbers, of which every process has its own."""

import copy
import traceback
from dataclasses import replace
from math import isfinite
from operator import attrgetter
from typing import Any

import pytest
import torch

from tests.distributed.pool import Pool
from tests.faithful.case import Call, Case
from tests.faithful.modules import CASES
from tests.faithful.run import (
    STEPS,
    Record,
    Setting,
    calls_of,
    differences,
    in_parallel,
    made,
    numbers_of,
    plan_for,
    train,
)

pytestmark = pytest.mark.full  # make test trains the same modules on threads (test_modules.py)

SOME = ("small_llama", "batch_norm_net", "exponential_average", "loss_outside", "nested_dict", "straight_through")
DRAWN = [case for case in CASES.values() if case.drawn]
SETTINGS = (Setting((2,), "batch"), Setting((2, 2), "tensor"))


def on_a_rank(rank: int, name: str, setting: Setting) -> dict[str, Any] | str | None:
    """What a rank sees, or its error: all ranks have the same, and the pool goes on."""
    try:
        return _seen(name, setting)
    except Exception:  # the test fails with it
        return traceback.format_exc()


def _seen(name: str, setting: Setting) -> dict[str, Any] | None:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.arange(torch.Size(setting.mesh).numel()).reshape(setting.mesh))
    if mesh.get_coordinate() is None:
        return None
    case = CASES[name]
    with numbers_of(case):
        model, calls = made(case), calls_of(case)
        plan = plan_for(case, model, calls[0], setting)
        torch.manual_seed(11)
        return in_parallel(case, model, calls, plan, mesh).seen


def on_all_ranks(pool: Pool, case: Case, setting: Setting) -> list[Record]:
    found = [seen for seen in pool(on_a_rank, case.name, setting) if seen is not None]
    for seen in found:
        assert not isinstance(seen, str), f"{setting}: {seen}"
    return [Record(seen) for seen in found]


def original(case: Case, calls: list[Call]) -> Record:
    with numbers_of(case):
        return train(case, made(case), copy.deepcopy(calls))


def with_draws(case: Case, calls: list[Call], found: Record) -> list[Call]:
    """The calls of the original, given what the parallel module has drawn."""
    draws = [{name: found.seen[f"step {step}: output[{name!r}]"] for name in case.replay} for step in range(STEPS)]
    return [replace(given, kwargs=given.kwargs | drawn) for given, drawn in zip(calls, draws, strict=True)]


@pytest.mark.parametrize("case", [CASES[name] for name in SOME], ids=attrgetter("name"))
def test_processes(case: Case, pool: Pool) -> None:
    with numbers_of(case):
        calls = calls_of(case)
    wanted = original(case, calls)
    for setting in SETTINGS:
        for found in on_all_ranks(pool, case, setting):
            assert not differences(wanted, found, case.tolerance), setting


@pytest.mark.parametrize("case", DRAWN, ids=attrgetter("name"))
def test_random_numbers(case: Case, pool: Pool) -> None:
    """All ranks see the same; where the draws are known, the original that is given them sees the same as well."""
    with numbers_of(case):
        calls = calls_of(case)
    for setting in SETTINGS:
        first, *others = on_all_ranks(pool, case, setting)
        for other in others:
            assert not differences(first, other, case.tolerance), setting
        losses = [float(first.seen[f"step {step}: loss"]) for step in range(STEPS)]
        assert all(map(isfinite, losses)), setting
        if case.replay:
            assert not differences(original(case, with_draws(case, calls, first)), first, case.tolerance), setting
