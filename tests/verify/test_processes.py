"""`tapas verify` in processes: it agrees, ranks that fail end the run, and nothing is left over."""

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tapas.api import verify
from tapas.cli.main import app
from tapas.errors import TapasError
from tapas.planner.fit import search
from tapas.verify import processes
from tapas.verify.homes import IMPORTING, enter_homes
from tapas.verify.verification import RankFailed
from tests.subjects import small_subject
from tests.verify.solved import examine_solution
from tests.verify.test_dispatch import examined
from tests.verify.test_verify import expect, posed, random_plan


def leftovers() -> list[str]:
    """Of this process: others may verify at the same time."""
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
    own = [line for line in listed.splitlines() if line.split()[0] == str(os.getpid())]
    return [line for line in own if processes.RANK in line]


FAILURES = [
    ("raise", "told to fail"),
    pytest.param("kill", "SIGKILL", marks=pytest.mark.full),
    pytest.param("sleep", "did not finish", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("how", "said"), FAILURES)
def test_a_rank_that_fails_ends_the_run(how: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "RANK", "tests.verify.failing_rank")
    monkeypatch.setenv("TAPAS_TEST_FAILURE", f"1:{how}")
    found, problem = posed("packed", "2")
    start = time.monotonic()
    with pytest.raises(RankFailed, match=said) as caught:
        examine_solution(found, search(problem), timeout=20 if how == "sleep" else 120)
    assert caught.value.place == "rank 1"
    assert time.monotonic() - start < (35 if how == "sleep" else 120)
    assert leftovers() == []


@pytest.mark.parametrize("mesh", ["2x2", pytest.param("4", marks=pytest.mark.full)])
def test_tokens_are_sent_to_their_experts(mesh: str) -> None:
    report = examined(small_subject("mixtral"), mesh, processes=True)
    expect(report)
    assert report.how == "processes" and "all_to_all" in {s.kind for s in report.sent["float64"]}


@pytest.mark.full  # a smaller case: the next test
def test_processes_verify_too() -> None:
    found, problem = posed("packed", "2")
    report = examine_solution(found, random_plan(problem, 5))
    expect(report)
    assert report.how == "processes"
    assert leftovers() == []


def test_processes_import_what_registers_operators() -> None:
    file = str(Path(__file__).parent / "own_operator.py")
    result = CliRunner().invoke(app, ["verify", f"{file}:make", "--mesh", "2", "--steps", "1", "--pin", "*=ddp"])
    assert result.exit_code == 0, result.output
    assert leftovers() == []


def test_an_operator_that_nobody_registers_is_named() -> None:
    graph = small_subject("packed").graph
    unknown = replace(graph, ops=(replace(graph.ops[0], target="tapas_test.nowhere.default"), *graph.ops[1:]))
    with pytest.raises(TapasError, match=r"tapas_test\.nowhere\.default is not registered .*--in-process"):
        enter_homes((), unknown)


def test_a_file_that_verifies_itself_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMPORTING, "1")
    with pytest.raises(TapasError, match="__main__"):
        verify(torch.nn.Linear(4, 4), (torch.zeros(2, 4),), mesh="2")
