"""The code in all pages is run, and prints what they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, code_blocks, name, run_page

RUNNABLE = [page for page in PAGES if any(block.mark != "not run" for block in code_blocks(page.read_text()))]


@pytest.mark.full
@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_code_in_pages_runs_and_prints_what_they_say(page: Path) -> None:
    command = [sys.executable, "-m", "tests.pages", str(page)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def test_a_small_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are run in order, one namespace for Python; what is printed is compared, or left to vary."""
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        '```toml title="a.toml"\nx = 1\n```\n```python\nfrom pathlib import Path\n```\n'
        '```python\nassert Path("a.toml").read_text() == "x = 1\\n"\n```\n```sh\ngrep -q x a.toml\n```\n'
        "```console\n$ echo good\ngood\n$ echo new\nold\n```\n<!-- outputs vary -->\n```console\n$ echo 2\n1\n```\n"
    )
    text, differ = run_page(page, tmp_path)
    assert "$ echo new\nnew\n" in text and "$ echo 2\n2\n" in text
    (said,) = differ
    assert "$ echo new\nold" in said and "echo 2" not in said
