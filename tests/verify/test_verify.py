"""`tapas verify`: every family agrees, every state and move is met, and what is wrong is found and named."""

import json
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tapas.api import verify
from tapas.cli.main import app
from tapas.errors import PlanError, TapasError
from tapas.planner.fit import search
from tapas.planner.pipeline import pose
from tapas.planner.request import Request
from tapas.planner.solution import Solution
from tapas.problem.problem import OpVariable, Problem
from tapas.runtime.kernels import index
from tapas.verify.subject import Subject, check_size
from tapas.verify.trial import lifted_graph
from tapas.verify.verification import Report
from tests.distributed.small import EAGER, FAMILIES
from tests.subjects import small_subject
from tests.verify.solved import examine_solution, float64_mostly

MESHES = ("2", "4", "2x2")
# The table of moves, but for PB: it goes by way of S, which saves a copy (test_moves.py tries it by itself).
ROWS = {"SS", "SR", "SB", "SP", "RS", "RB", "RP", "BS", "BR", "BP", "PS", "PR"}

states: Counter[str] = Counter()
moves: Counter[str] = Counter()
finished: set[tuple] = set()


@cache
def posed(family: str, mesh: str) -> tuple[Subject, Problem]:
    found = small_subject(family)
    return found, pose(found.graph, Request.of(mesh, EAGER))[0]


def random_plan(problem: Problem, seed: int) -> Solution:
    """The best plan of those that are left when most choices of every operator are taken away at random."""
    rng = np.random.default_rng(seed)
    for _ in range(40):
        rows = {}
        for b, part in enumerate(problem.blocks):
            for v, variable in enumerate(part.variables):
                if isinstance(variable, OpVariable):
                    n = len(variable.table)
                    rows[b, v] = np.sort(rng.choice(n, size=max(1, n // 6), replace=False))
        try:
            return search(problem, rows)
        except PlanError:
            continue
    raise AssertionError("no random plan works")


def note(solution: Solution) -> None:
    for group in solution.groups():
        for transfer in solution.transfers(group):
            for move in transfer.moves:
                moves[move.old.kind + move.new.kind] += 1
        for variable, choice in zip(solution.part(group).variables, group.choices, strict=False):
            if isinstance(variable, OpVariable):
                for option in variable.table.choice(choice).options:
                    states.update(state.kind for state in (*option.operands, *option.results))


def expect(report: Report) -> None:
    wrong = [c for c in report.checks if not c.ok], [s for sent in report.sent.values() for s in sent if not s.ok]
    assert report.ok, (*wrong, report.culprit)


full = pytest.mark.full


BEST = ("llama", "t5", "mixtral", "resnet")  # odd plans are verified of all families


@pytest.mark.parametrize("mesh", [pytest.param("2", marks=full), pytest.param("4", marks=full), "2x2"])
@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in BEST else full) for f in FAMILIES])
def test_best_plan_is_the_original(family: str, mesh: str) -> None:
    found, problem = posed(family, mesh)
    solution = search(problem)
    note(solution)
    report = examine_solution(found, solution, in_process=True)
    expect(report)
    assert report.split[0] > report.split[1] / 2
    assert any(report.sent.values())
    finished.add((family, mesh))


@pytest.mark.parametrize("mesh", [pytest.param("2", marks=full), pytest.param("4", marks=full), "2x2"])
@pytest.mark.parametrize("family", FAMILIES)
@float64_mostly
def test_odd_plans_are_the_original(family: str, mesh: str, precisions: tuple[str, ...]) -> None:
    found, problem = posed(family, mesh)
    solution = random_plan(problem, MESHES.index(mesh))
    note(solution)
    expect(examine_solution(found, solution, precisions, in_process=True, steps=1))
    finished.add((family, mesh, "odd"))


def test_every_state_and_every_move_was_met(capsys: pytest.CaptureFixture) -> None:
    if len(finished) < 3 * len(FAMILIES):
        pytest.skip("only some of the plans above were run")
    with capsys.disabled():
        met = (dict(sorted(counter.items())) for counter in (states, moves))
        print("\nmet in {} plans: states {}, moves {}".format(len(finished), *met))
    assert set(states) == {"S", "R", "B", "P"}
    assert set(moves) >= ROWS


# ------------------------------------------------------------------------------------- what is wrong is found


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found, problem = posed("llama", "2")
    solution = _with_kernel(problem)
    monkeypatch.setattr(index, "embedding", lambda *given: _scaled(_original(*given)))
    report = examine_solution(found, solution, in_process=True, steps=1)
    assert not report.ok and report.culprit is not None
    assert (report.culprit.target, report.culprit.phase) == ("aten.embedding.default", "forward")
    assert report.culprit.module == "model.embed_tokens"


_original = index.embedding


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + 1e-6)


def _with_kernel(problem: Problem) -> Solution:
    """The embedding's table is split by rows, which takes a kernel."""
    for b, part in enumerate(problem.blocks):
        for v, variable in enumerate(part.variables):
            if isinstance(variable, OpVariable) and variable.op.target == "aten.embedding.default":
                own = [variable.table.choice(i).options[0] for i in range(len(variable.table))]
                rows = [i for i, o in enumerate(own) if o.factor is not None and o.factor.kernel is not None]
                return search(problem, {(b, v): np.array(rows)})
    raise AssertionError("no embedding")


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found, problem = posed("llama", "2")
    monkeypatch.setattr(index, "embedding", lambda *given: _Doubled.apply(_original(*given)))
    report = examine_solution(found, _with_kernel(problem), in_process=True, steps=1)
    failed = {check.what for check in report.checks if not check.ok}
    assert "gradients" in failed and "outputs" not in failed
    assert report.culprit is not None
    assert (report.culprit.target, report.culprit.phase) == ("aten.embedding.default", "backward")


def test_wrong_bytes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from tapas.runtime.redistribute import Conversion

    plain = Conversion._note
    monkeypatch.setattr(Conversion, "_note", lambda self, c, phase, nbytes: plain(self, c, phase, nbytes + 8))
    found, problem = posed("packed", "2")
    report = examine_solution(found, search(problem), in_process=True, steps=1)
    assert not report.ok and report.culprit is None
    assert all(check.ok for check in report.checks)


# ------------------------------------------------------------------------------------- asking for it

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
LLAMA = ["llama3-8b", *(p for k, v in SMALL.items() for p in ("--set", f"{k}={v}")), "--batch", "4", "--seq", "8"]
GPT2 = ["gpt2", "--set", "n_embd=32", "--set", "n_head=4", "--set", "n_layer=2", "--set", "vocab_size=64", "--set",
        "bos_token_id=0", "--set", "eos_token_id=0", "--batch", "4", "--seq", "8"]  # fmt: skip


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_command_line_says_verified() -> None:
    result = run("verify", *LLAMA, "--mesh", "2x2", "--pin", "*=megatron", "--in-process")
    assert result.exit_code == 0, result.output
    assert "VERIFIED" in result.stdout and "float64 error" in result.stdout and "predicted" in result.stdout


def test_a_saved_plan_is_verified_and_dropout_is_mentioned(tmp_path) -> None:
    path = str(tmp_path / "plan.json")
    assert run("plan", *GPT2, "--mesh", "2", "--pin", "*=fsdp", "-o", path).exit_code == 0
    result = run("verify", path, "--in-process", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["ok"] and data["silenced"] and data["split_operators"] > 0
    assert all(row["ok"] for rows in data["collectives"].values() for row in rows)


def test_a_failed_check_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from tapas.runtime.collectives import Count

    monkeypatch.setattr(Count, "add", lambda *_: None)
    result = run("verify", *LLAMA, "--mesh", "2", "--pin", "*=fsdp", "--in-process", "--steps", "1")
    assert result.exit_code == 1
    assert "NOT VERIFIED" in result.stdout and "collectives" in result.stdout.splitlines()[-1]


def test_too_large_a_model_is_refused_by_name_size_and_remedy() -> None:
    result = run("verify", "llama3-8b", "--mesh", "2x2")
    assert result.exit_code == 2
    assert "GB" in result.stderr and "--set num_hidden_layers=2" in result.stderr
    with pytest.raises(TapasError, match="limit"):
        check_size("it", 1000, 4, share=3e9)


def test_weights_without_data_are_made_and_inputs_are_asked_for() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    expect(verify(model, (torch.randn(4, 4),), mesh="2", cluster=EAGER, training=True, in_process=True))
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(TapasError, match="input: is on the meta device"):
        verify(model, (torch.zeros(2, 4, device="meta"),), mesh="2", in_process=True)


def test_inference_compares_outputs_only() -> None:
    report = verify(torch.nn.Linear(8, 8).eval(), (torch.randn(4, 8),), mesh="2", cluster=EAGER, in_process=True)
    expect(report)
    assert [check.what for check in report.checks] == ["outputs"]


def test_lifting_widens_every_floating_type() -> None:
    graph = lifted_graph(small_subject("llama").graph, "float64")
    assert {t.dtype for t in graph.tensors.values()} <= {"float64", "int64", "bool", "int32"}


def test_a_model_that_learns_nothing_tests_little() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (0 * self.linear(x)).sum()

    for model, flat in ((Silent(), True), (nn.Sequential(nn.Linear(8, 8)), False)):
        report = verify(model, (torch.randn(4, 8),), mesh=2, training=True, in_process=True, steps=1)
        assert report.ok and report.flat == flat


class Spread(nn.Module):
    """Code that depends on activations, and makes numbers of torch's default dtype to write others to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() < 1e9:
            into = torch.zeros(len(y), 8)
            into[torch.arange(2)] = y[:2]
        else:
            into = y
        return into.square().sum()


def test_what_stays_whole_makes_numbers_as_wide_as_all_others() -> None:
    before = torch.get_default_dtype()
    report = verify(Spread(), (torch.randn(4, 6),), mesh="2", pins={"*linear*": "fsdp"}, in_process=True, steps=2)
    assert report.ok and torch.get_default_dtype() == before
