"""The house keeps its order: imports go down, class names are used once, what is private of torch stays in one room.

Every check reads a source tree with `ast` and returns the violations as lines of text; `python -m tests.test_layers`
prints those of the package. Imports inside of functions, under TYPE_CHECKING and by `import_module` count.
"""

import ast
import functools
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tapas"
# Low to high: a module imports from its own level or below. `__init__` is the public package.
LEVELS = (
    ("errors", "util", "_torch"), ("search",), ("ir",), ("hardware",), ("sharding",), ("capture",), ("rules",),
    ("cost",), ("problem",), ("plan",), ("planner",), ("runtime",),
    ("checkpoint", "models", "verify", "export", "calibrate", "serving"),
    ("report",), ("cli",), ("api", "__init__"),
)  # fmt: skip
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# A plan runs without what found it.
NEVER = {"runtime": ("problem", "search", "planner")}
WRAPPED = ("torch", "transformers")
WRAPPER = "_torch"
# Watching the interpreter disturbs profilers and debuggers, and reading bytecode ties us to one Python.
INTERPRETER = ("sys.setprofile", "sys.settrace", "sys._getframe", "sys.monitoring", "dis")
TOP_LEVEL_FILES = 12


@functools.cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """All nodes of a file; the planted tests read nearly the same tree again and again."""
    return tuple(ast.walk(ast.parse(text)))


class Module:
    """One file of the tree: its dotted name below `tapas`, its room and its syntax."""

    def __init__(self, root: Path, path: Path):
        self.path = path.relative_to(root)
        parts = self.path.with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.parts = parts[:-1] if self.is_package else parts
        self.room = self.parts[0] if self.parts else "__init__"
        self.nodes = nodes_of(path.read_text())

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"

    def imports(self) -> Iterator[tuple[ast.AST, str]]:
        """Dotted names of all that is imported, `from a import b` as `a.b`."""
        for node in self.nodes:
            match node:
                case ast.Import():
                    yield from ((node, alias.name) for alias in node.names)
                case ast.ImportFrom():
                    above = ("tapas", *self.parts)[: len(self.parts) + 1 + self.is_package - node.level]
                    base = ".".join([*(above if node.level else ()), *([node.module] if node.module else ())])
                    yield from ((node, f"{base}.{alias.name}") for alias in node.names)
                case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                    if ast.unparse(function).rpartition(".")[2] in ("import_module", "__import__"):
                        yield node, name


class Tree:
    """All modules of a package, by their dotted names below `tapas`."""

    def __init__(self, root: Path):
        self.root = root
        self.modules = [Module(root, path) for path in sorted(root.rglob("*.py"))]
        self.names = {module.parts for module in self.modules}

    def imported(self, module: Module) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
        """Modules of the package that a module imports; () is the public package itself."""
        for node, name in module.imports():
            first, *parts = name.split(".")
            if first == "tapas":
                while tuple(parts) not in self.names:
                    parts.pop()
                yield node, tuple(parts)

    def edges(self) -> Iterator[tuple[Module, ast.AST, str]]:
        """Imports from one room into another."""
        for module in self.modules:
            for node, target in self.imported(module):
                room = target[0] if target else "__init__"
                if room != module.room:
                    yield module, node, room


def upward_imports(tree: Tree) -> list[str]:
    found = [f"{m.path}: room {m.room} has no level" for m in tree.modules if m.room not in LEVEL]
    for module, node, room in tree.edges():
        if room in NEVER.get(module.room, ()):
            found.append(f"{module.at(node)}: {module.room} must do without {room}")
        elif LEVEL.get(room, 0) > LEVEL.get(module.room, 0):
            found.append(f"{module.at(node)}: {module.room} imports {room}, which lies above")
    offered = {name.rpartition(".")[2] for m in tree.modules if m.parts == ("search",) for _, name in m.imports()}
    for module in tree.modules:
        for node, target in tree.imported(module):
            named = isinstance(node, ast.ImportFrom) and node.module == "tapas.search" and target[-1] in offered
            if module.room != "search" and target[:1] == ("search",) and len(target) > 1 and not named:
                found.append(f"{module.at(node)}: imports {'.'.join(target)} instead of a name of tapas.search")
    return list(dict.fromkeys(found))


def cycles(tree: Tree) -> list[str]:
    """Rooms that reach themselves, each with the rooms on one shortest way round."""
    successors: dict[str, set[str]] = defaultdict(set)
    for module, _, room in tree.edges():
        successors[module.room].add(room)
    found: dict[frozenset[str], str] = {}
    for start in sorted(successors):
        paths, reached = [[start]], {start}
        for path in paths:
            for room in sorted(successors.get(path[-1], ())):
                if room == start:
                    found.setdefault(frozenset(path), f"cycle: {' -> '.join([*path, start])}")
                elif room not in reached:
                    reached.add(room)
                    paths.append([*path, room])
    return list(found.values())


def repeated_class_names(tree: Tree) -> list[str]:
    """Classes inside of functions and of classes count."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in tree.modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.at(node))
    return [f"class {name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def private_part(name: str) -> str | None:
    """A dotted name up to its first private component."""
    parts = name.split(".")
    private = [at for at, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
    return ".".join(parts[: private[0] + 1]) if private else None


def private_names(tree: Tree) -> list[str]:
    """Imports, attributes (through any alias) and `getattr` of private names of torch and transformers."""
    found: list[str] = []
    for module in tree.modules:
        if module.room == WRAPPER:
            continue
        names = [(module.at(node), name) for node, name in module.imports()]
        aliases = dict(bound_names(module))
        for node in module.nodes:
            if isinstance(node, ast.Attribute | ast.Call) and (name := dotted(node, aliases)):
                names.append((module.at(node), name))
        for place, name in names:
            if name.split(".")[0] in WRAPPED and (private := private_part(name)):
                found.append(f"{place}: {private} is private")
            elif any(name == watched or name.startswith(f"{watched}.") for watched in INTERPRETER):
                found.append(f"{place}: {name} watches the interpreter")
    return list(dict.fromkeys(found))


def bound_names(module: Module) -> Iterator[tuple[str, str]]:
    """What the names that imports bind stand for."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """`a.b.c` and `getattr(a.b, "c")` with the name that an import bound written out; None for anything else."""
    match node:
        case ast.Name(id=name):
            return aliases.get(name)
        case ast.Attribute(value=value, attr=name):
            pass
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
            pass
        case _:
            return None
    root = dotted(value, aliases)
    return root and f"{root}.{name}"


def crowded_hallway(tree: Tree) -> list[str]:
    files = sorted(path.name for path in tree.root.iterdir() if path.is_file())
    return [f"{len(files)} files at the top level: {', '.join(files)}"] if len(files) > TOP_LEVEL_FILES else []


def rooms_without_purpose(tree: Tree) -> list[str]:
    """A package says in the first line of its `__init__.py` what it is for; the rest of the text is free."""
    found: list[str] = []
    for folder in sorted({path.parent for path in tree.root.rglob("*.py")}):
        init = folder / "__init__.py"
        text = (ast.get_docstring(ast.parse(init.read_text())) or "") if init.exists() else ""
        if not text.split("\n")[0].endswith("."):
            found.append(f"{folder.relative_to(tree.root)}: no one-line purpose in its __init__.py")
    return found


Check = Callable[[Tree], list[str]]
CHECKS: tuple[Check, ...] = (
    upward_imports, cycles, repeated_class_names, private_names, crowded_hallway, rooms_without_purpose,
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_house_is_in_order(check: Check):
    violations = check(Tree(SOURCE))
    assert not violations, "\n" + "\n".join(violations)


PLANTED: list[tuple[Check, str, str, str]] = [
    (upward_imports, "ir/planted.py", "from tapas.rules import rule_of", "ir imports rules"),
    (upward_imports, "ir/planted.py", "def f():\n    import tapas.planner", "ir imports planner"),
    (upward_imports, "sharding/planted.py", "if TYPE_CHECKING:\n    from .. import cost", "sharding imports cost"),
    (upward_imports, "plan/planted.py", "from tapas import report", "plan imports report"),
    (upward_imports, "plan/planted.py", "from tapas import Plan", "plan imports __init__"),
    (upward_imports, "plan/planted.py", "import_module('tapas.report')", "plan imports report"),
    (upward_imports, "search/planted.py", "from tapas.ir import graph", "search imports ir"),
    (upward_imports, "runtime/planted.py", "from tapas.problem import build", "runtime must do without problem"),
    (upward_imports, "planner/planted.py", "from tapas.search.network import Network", "search.network instead of"),
    (upward_imports, "planner/planted.py", "from tapas.search import network", "search.network instead of"),
    (upward_imports, "planted/__init__.py", '"""A room."""', "room planted has no level"),
    (cycles, "errors.py", "from tapas.hardware import cluster", "errors -> hardware -> errors"),
    (repeated_class_names, "ir/planted.py", "class TapasError: ...", "class TapasError: errors.py:"),
    (repeated_class_names, "ir/planted.py", "class A:\n    class B: ...\ndef f():\n    class B: ...", "class B: "),
    (private_names, "ir/planted.py", "import torch\ntorch._C", "torch._C is private"),
    (private_names, "ir/planted.py", "import torch.utils._pytree", "torch.utils._pytree is private"),
    (private_names, "ir/planted.py", "from torch.utils import _pytree as t", "torch.utils._pytree is private"),
    (private_names, "ir/planted.py", "import torch.distributed as d\nd.x._y()", "torch.distributed.x._y is private"),
    (private_names, "ir/planted.py", "def f():\n    from torch import fx\n    fx.X._f", "torch.fx.X._f is private"),
    (private_names, "ir/planted.py", "import torch\ngetattr(torch, '_x', 1)", "torch._x is private"),
    (private_names, "ir/planted.py", "import_module('transformers._x')", "transformers._x is private"),
    (private_names, "ir/planted.py", "import sys\nsys.setprofile(None)", "sys.setprofile watches"),
    (private_names, "ir/planted.py", "import dis", "dis watches"),
    (rooms_without_purpose, "ir/planted/a.py", "", "ir/planted: no one-line purpose"),
    (rooms_without_purpose, "ir/planted/__init__.py", '"""First half\n\nsecond half."""', "ir/planted: no one-line"),
]  # fmt: skip


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "tapas"
    return Path(shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__")))


@contextmanager
def planted(copy: Path, texts: dict[str, str]) -> Iterator[Tree]:
    """A copy of the package with lines added at the end of files, while it lasts."""
    before = {copy / name: (copy / name).read_text() if (copy / name).exists() else None for name in texts}
    for (path, text), line in zip(before.items(), texts.values(), strict=True):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{text or ''}\n{line}\n")
    try:
        yield Tree(copy)
    finally:
        for path, text in before.items():
            path.unlink() if text is None else path.write_text(text)


@pytest.mark.parametrize("check, file, text, complaint", PLANTED)
def test_a_planted_violation_is_seen(check: Check, file: str, text: str, complaint: str, copy: Path):
    before = check(Tree(copy))
    with planted(copy, {file: text}) as tree:
        assert any(complaint in line for line in check(tree) if line not in before)


def test_a_cycle_on_one_level_is_seen(copy: Path):
    rooms = [("checkpoint", "models"), ("models", "verify"), ("verify", "checkpoint")]
    with planted(copy, {f"{room}/planted.py": f"import tapas.{other}" for room, other in rooms}) as tree:
        assert any("models" in line and "checkpoint" in line for line in cycles(tree))


def test_a_crowded_hallway_is_seen(copy: Path):
    with planted(copy, {f"planted{number}.py": "" for number in range(TOP_LEVEL_FILES + 1)}) as tree:
        assert crowded_hallway(tree)


@pytest.mark.parametrize("text", [
    "import torch\ntorch.__version__", "import torch\nself._torch", "from tapas import _torch\n_torch.x",
    "def f(torch):\n    return torch.fx._symbolic",
])  # fmt: skip
def test_what_only_looks_private_is_not_meant(text: str, copy: Path):
    with planted(copy, {"ir/planted.py": text}) as tree:
        assert not [line for line in private_names(tree) if "planted" in line]


if __name__ == "__main__":
    for check in CHECKS:
        print(f"== {check.__name__}", *check(Tree(SOURCE)), sep="\n")
