"""The documentation: links hold, commands are understood, the site builds without a warning and fetches nothing."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from tapas.cli.main import app
from tests.pages import PAGES, ROOT, CodeBlock, code_blocks, commands, name


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=name)
def test_links_hold(page: Path) -> None:
    """On the site mkdocs looks after them; these two are read elsewhere."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())
    assert links and [link for link in links if not (page.parent / link).exists()] == []


def typed(block: CodeBlock) -> list[str]:
    """The command lines of a block."""
    text = "\n".join(command for command, _ in commands(block)) if block.language == "console" else block.text
    return text.replace("\\\n", " ").split("\n")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_in_pages_are_understood(page: Path) -> None:
    """Parsed, not run: an option that was renamed is seen in `make test` already."""
    shell = [block for block in code_blocks(page.read_text()) if block.language in ("sh", "console")]
    for line in (line for block in shell for line in typed(block) if line.startswith("tapas ")):
        words = shlex.split(line.partition(" | ")[0], comments=True)[1:]
        if not words[0].startswith("-"):
            command = get_command(app).commands[words[0]]  # type: ignore[attr-defined]
            command.make_context(words[0], words[1:])


def test_the_site_builds_without_warnings_and_fetches_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"((?:https?:)?//[^\"]+)", text)
        assert loaded == [] and 'class="mermaid"' not in text, page
    pages = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in PAGES if page.parent != ROOT}
    assert pages <= {str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.html")}
    reference = (tmp_path / "reference" / "command-line.html").read_text()
    assert all(f"tapas {command}" in reference for command in get_command(app).commands)  # type: ignore[attr-defined]
    assert "tapas.local_optimizer" in (tmp_path / "reference" / "python.html").read_text()


def test_blocks_are_read_with_their_marks_and_titles() -> None:
    text = (
        '```python title="a.py"\n1\n```\n\n<!-- not run: no -->\n```sh\nx\n```\n```console\n$ a \\\n  b\nc\n$ d\n```\n'
    )
    file, shell, console = code_blocks(text)
    assert (file.title, shell.mark, console.language) == ("a.py", "not run", "console")
    assert list(commands(console)) == [("a \\\n  b", "c\n"), ("d", "")]
