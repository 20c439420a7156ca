"""The code in README.md and docs/: run in order, page by page, each in a folder of its own.

    python -m tests.pages PAGE...            run them; the outputs that a page shows have to be those of now
    python -m tests.pages --write PAGE...    run them, and write what they print into the pages

Fenced blocks are run by their language: `python` in one namespace for the page, `sh` as a script, and of `console` the
lines that begin with `$ `, whose output stands below them. A block with `title="file"` is that file. Above a block,
`<!-- not run: why -->` and `<!-- outputs vary -->` (with the machine, so they are not compared) make exceptions.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

FENCE = re.compile(
    r"^(?P<mark><!-- (?:not run: [^\n]+|outputs vary) -->\n)?```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<text>.*?)^```$",
    re.S | re.M,
)


@dataclass(frozen=True, slots=True)
class CodeBlock:
    language: str
    title: str
    text: str
    mark: str  # "not run", "outputs vary" or ""
    span: tuple[int, int]  # where its text stands in the page


def code_blocks(page: str) -> list[CodeBlock]:
    return [
        CodeBlock(
            found["language"], found["title"] or "", found["text"],
            next((mark for mark in ("not run", "outputs vary") if mark in (found["mark"] or "")), ""),
            found.span("text"),
        )
        for found in FENCE.finditer(page)
    ]  # fmt: skip


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(block: CodeBlock) -> Iterator[tuple[str, str]]:
    """What is typed in a `console`, and what the page says is printed."""
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        lines = part.split("\n")
        ends = next(i for i, line in enumerate(lines) if not line.endswith("\\")) + 1
        yield "\n".join(lines[:ends]), "\n".join(lines[ends:])


def run_page(path: Path, folder: Path) -> tuple[str, list[str]]:
    """The page with what its commands print now, and what differs from what it says."""
    page = path.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    pieces, end, differ = list[str](), 0, list[str]()
    os.chdir(folder)
    for block in code_blocks(page):
        text = block.text
        if block.mark == "not run":
            continue
        if block.title:
            Path(block.title).write_text(text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(text, f"{path.name}: {text.splitlines()[0]}", "exec"), names)
        elif block.language == "sh":
            subprocess.run(["bash", "-e"], input=text, text=True, check=True, env=environment())
        elif block.language == "console":
            text = "".join(f"$ {command}\n{printed(command)}" for command, _ in commands(block))
            if text != block.text and block.mark != "outputs vary":
                differ.append(f"{path.name}: wants\n{block.text}\nand got\n{text}")
        pieces += [page[end : block.span[0]], text]
        end = block.span[1]
    return "".join([*pieces, page[end:]]), differ


def environment() -> dict[str, str]:
    """With the commands of this Python, and the package of this repository."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    kept = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    return kept | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def printed(command: str) -> str:
    done = subprocess.run(
        ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )
    text = "\n".join(line.rstrip() for line in done.stdout.rstrip().split("\n"))
    return f"{text}\n" if text else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="write outputs into the pages")
    chosen = parser.parse_args()
    different: list[str] = []
    for path in [path.resolve() for path in chosen.pages]:
        with tempfile.TemporaryDirectory() as folder:
            page, differ = run_page(path, Path(folder))
            os.chdir(ROOT)
        if chosen.write:
            path.write_text(page, encoding="utf-8")
        different += differ
    if different and not chosen.write:
        sys.exit("\n".join(different))
