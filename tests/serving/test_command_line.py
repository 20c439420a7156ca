"""`tapas plan --serve`: what it prints and writes, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tapas
from tapas.cli.main import app
from tests.cli.test_cli import SMALL

MODEL = ["plan", "llama3-8b", *(part for setting in SMALL for part in ("--set", setting)), "--mesh", "2"]
SERVED = ["--serve", "--batch", "4", "--prompt", "16", "--new", "8"]


@pytest.mark.full
def test_a_plan_is_written_and_told(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*MODEL, *SERVED, "-o", str(tmp_path / "serve.json"), "--json"])
    assert result.exit_code == 0, result.output
    told, plan = json.loads(result.stdout), tapas.load_serving_plan(tmp_path / "serve.json")
    assert told["workload"] == {"batch": 4, "prompt": 16, "new": 8}
    assert told["first_token_seconds"] == plan.prefill.cost
    assert list(told["degrees"]) == ["1", "2"]


@pytest.mark.parametrize(("options", "words"), [
    (["--prompt", "16"], "--prompt, --new: say what is served at a time; give --serve"),
    (["--serve", "--prompt", "16"], "--batch, --new: is missing"),
    ([*SERVED, "--seq", "8", "--pieces", "2"], "--seq, --pieces: does not go with --serve"),
])  # fmt: skip
def test_refused(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, [*MODEL, *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
