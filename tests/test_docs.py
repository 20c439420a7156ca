"""The documents say what is there: the table of rooms is made from docstrings, and what the tour names exists.

`make docs` (python -m tests.test_docs) writes the table anew.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_layers import LEVELS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tapas"
CONTRIBUTING, TOUR = ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"
START, END = "<!-- rooms: written by `make docs` -->\n", "<!-- end of rooms -->\n"


def purpose(file: Path) -> str:
    """The first line of a docstring, without its full stop."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return text.split("\n")[0].removesuffix(".")


def rooms_table() -> str:
    """Rooms and what is in them, lowest first."""
    rows = ["| room | what is in it |", "|---|---|"]
    for name in (name for level in LEVELS for name in level):
        if (SOURCE / f"{name}.py").exists():
            rows.append(f"| `{name}.py` | {purpose(SOURCE / f'{name}.py')} |")
        for init in sorted((SOURCE / name).rglob("__init__.py")):
            rows.append(f"| `{init.parent.relative_to(SOURCE)}/` | {purpose(init)} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    before, _, rest = text.partition(START)
    return before + START + rooms_table() + END + rest.partition(END)[2]


def test_table_of_rooms() -> None:
    text = CONTRIBUTING.read_text()
    assert text == with_table(text), "the docstrings of the rooms have changed: run `make docs`"


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes, methods as `Class.method` and names at the top level."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
            inner += [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
            found.update(f"{node.name}.{name}" for name in inner)
        if isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return frozenset(found)


def place(path: str) -> Path | None:
    """A path of the repository, one below src/tapas, or the mere name of a test."""
    found = [root / path for root in (ROOT, SOURCE) if (root / path).exists()]
    return next(iter([*found, *(ROOT / "tests").rglob(path)]), None)


def missing(text: str) -> list[str]:
    """What a text names and the repository does not have: `folder/` and `file.py`, `name` in `file.py`."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    paths = re.findall(r"`((?:[\w.-]+/)*[\w.-]+(?:\.(?:py|toml|md|txt)|/))`", text)
    found = [path for path in paths if place(path) is None]
    for names, path in re.findall(r"((?:`[\w.]+`(?:, | and )?)+) in `([\w/.-]+\.py)`", text):
        for name in re.findall(r"`([\w.]+)`", names):
            file = place(path)
            if file is not None and name not in names_in(file):
                found.append(f"{name} in {path}")
    return found


@pytest.mark.parametrize("document", [TOUR, CONTRIBUTING], ids=lambda path: path.name)
def test_what_is_named_exists(document: Path) -> None:
    assert missing(document.read_text()) == []


def test_what_is_named_and_missing_is_seen() -> None:
    text = "`purpose` and `nothing` in `tests/test_docs.py`, `gone.py`, `ir/`, `Graph.none` in `ir/graph.py`"
    assert missing(text) == ["gone.py", "nothing in tests/test_docs.py", "Graph.none in ir/graph.py"]


def test_the_tour_can_be_found() -> None:
    for document in (ROOT / "README.md", CONTRIBUTING):
        assert "docs/architecture.md" in document.read_text()


if __name__ == "__main__":
    CONTRIBUTING.write_text(with_table(CONTRIBUTING.read_text()))
