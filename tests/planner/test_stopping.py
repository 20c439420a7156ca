"""Searches that end early, by a time limit or by Ctrl-C: the best plan so far, with its gap, and words that say so."""

import os
import signal
from functools import cache
from pathlib import Path

import pytest

from tapas.cli.app import stoppable
from tapas.plan.plan import Plan, load_plan
from tapas.planner.fit import DoesNotFit
from tapas.planner.pipeline import plan_graph, within
from tapas.planner.request import Request
from tests.distributed.small import EAGER
from tests.subjects import small_subject


@cache
def tight() -> float:
    """A limit that the fastest plan does not keep, and others do."""
    asked = within(small_subject("llama").graph, Request.of("2", EAGER, memory=None))
    return 0.7 * asked.smallest().nbytes + 0.3 * asked.best().peak.nbytes


def planned(limit: float | None, time_limit: float | None = None, progress=lambda stage: None) -> Plan:
    request = Request.of("2", EAGER, memory=limit, time_limit=time_limit, baselines=["fsdp"])
    return plan_graph(small_subject("llama").graph, request, {}, progress=progress)


@cache
def full_plan() -> Plan:
    return planned(tight())


def test_ctrl_c_returns_the_first_plan_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit, shown = tight(), []

    def progress(stage: str) -> None:
        shown.append(stage)
        if "s a step" in stage and "no plan yet" not in stage:
            os.kill(os.getpid(), signal.SIGINT)

    full, handler = full_plan(), signal.getsignal(signal.SIGINT)
    with stoppable():
        plan = planned(limit, progress=progress)
    assert signal.getsignal(signal.SIGINT) is handler
    assert "stopping with the best plan so far" in capsys.readouterr().err
    assert full.cost * (1 - 1e-9) <= plan.cost and plan.bound <= full.cost * (1 + 1e-9)
    assert sum(plan.memory.values()) <= limit and plan.gap > 0 and plan.proof.startswith("gap")
    assert "interrupted" in plan.warnings[0] and "interrupted" not in "".join(full.warnings)
    assert all(b["cost"] is None and "interrupted" in b["why"] for b in plan.baselines.values())
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").warnings == plan.warnings


def test_ctrl_c_twice_ends_all(capsys: pytest.CaptureFixture[str]) -> None:
    def progress(stage: str) -> None:
        if stage.startswith("compare") or ("s a step" in stage and "no plan yet" not in stage):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), stoppable():
        planned(tight(), progress=progress)
    with pytest.raises(KeyboardInterrupt), stoppable():
        os.kill(os.getpid(), signal.SIGINT)  # nothing is searched


def test_no_time_at_all() -> None:
    """There is a plan all the same, if it need not fit."""
    plan, full = planned(None, 0.0), planned(None)
    assert plan.cost >= full.cost * (1 - 1e-9) and plan.bound <= full.cost * (1 + 1e-9)
    assert plan.source["time_limit"] == 0.0 and "time_limit" not in full.source
    assert plan.proof == "optimal" or "time limit" in plan.warnings[0]


def test_no_plan_fits_yet() -> None:
    limit = tight()
    with pytest.raises(DoesNotFit, match="was found in time that fits") as caught:
        planned(limit, 0.0)
    assert "--time-limit" in caught.value.remedy and caught.value.bound <= limit < caught.value.peak.nbytes


def test_enough_time_changes_nothing() -> None:
    assert planned(tight(), 1000.0).assignment == full_plan().assignment
