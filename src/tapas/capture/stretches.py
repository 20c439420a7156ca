"""Stretches of statements in a model's code, which can be taken out of their function as one call.

The function's code is compiled anew with a call in their place, and the statements as a function of their own. They see
the same globals and get the locals that they read by name.
"""

import ast
import copy
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import CO_NESTED, CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FunctionType
from typing import Any

from tapas.capture.assertions import covers, syntax_of
from tapas.ir.regions import Statements

_LOOPS = (ast.For, ast.While)
_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_NEVER = (
    ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Nonlocal, ast.Global, ast.Delete, ast.Match,
    ast.Import, ast.ImportFrom,
)  # fmt: skip
_SPECIAL = frozenset(("super", "locals", "vars", "eval", "exec", "__class__"))


def loads(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that are read."""
    found: set[str] = set()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def stores(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that are bound."""
    found: set[str] = set()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
    return found


@dataclass(frozen=True, eq=False)
class Stretch:
    """Statements `start:stop` of a block of a function; `around` are the blocks that hold it, with its place there."""

    function: Any  # of Python
    code: CodeType  # as it was written
    tree: ast.FunctionDef
    around: tuple[tuple[list[ast.stmt], int], ...]
    block: list[ast.stmt]
    start: int
    stop: int

    @property
    def inside(self) -> list[ast.stmt]:
        return self.block[self.start : self.stop]

    @property
    def everything(self) -> bool:
        """Whether nothing is left of the function but its documentation."""
        others = [*self.block[: self.start], *self.block[self.stop :]]
        return not self.around and all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in others)

    @property
    def place(self) -> str:
        name = self.code.co_filename.replace("\\", "/").rpartition("/")[2]
        return f"{name}:{self.inside[0].lineno} in {self.code.co_name}"

    def holds(self, other: "Stretch") -> bool:
        first, last = self.inside[0], self.inside[-1]
        mine = (first.lineno, first.col_offset, last.end_lineno or 0, last.end_col_offset or 0)
        first, last = other.inside[0], other.inside[-1]
        theirs = (first.lineno, first.col_offset, last.end_lineno or 0, last.end_col_offset or 0)
        return self.code is other.code and mine[:2] <= theirs[:2] and theirs[2:] <= mine[2:]

    @cached_property
    def returning(self) -> bool:
        """Whether the function ends with it: then it may return."""
        ends = not self.around and self.stop == len(self.block)
        return ends or isinstance(self.inside[-1], (ast.Return, ast.Raise))

    @cached_property
    def later(self) -> set[str]:
        """Names that are read afterwards."""
        if self.returning:
            return set()
        blocks = [*self.around, (self.block, self.stop - 1)]
        after = [statement for block, place in blocks for statement in block[place + 1 :]]
        loops = [block[place] for block, place in self.around if isinstance(block[place], _LOOPS)]
        return loads([*after, *loops[:1]])

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Those that it binds."""
        return tuple(sorted(stores(self.inside) & self.later))

    def own(self, name: str) -> bool:
        """Whether a name is no argument of the function, and nobody reads it afterwards."""
        return name not in self.later and name not in self.code.co_varnames[: _arguments(self.code)]

    @cached_property
    def feasible(self) -> bool:
        """Whether it can be taken out, by the look of it."""
        nodes = [node for statement in self.inside for node in ast.walk(statement)]
        if any(isinstance(node, _NEVER) for node in nodes) or _special(nodes) or _mangled(self.tree):
            return False
        returns = any(isinstance(node, ast.Return) for node in _own(self.inside))
        return (self.returning or not returns) and not _leaves_loop(self.inside)

    def wider(self, made: set[str], given: set[str]) -> "Stretch | None":
        """With the statements that read names that it makes, or make names that it is given, or with what is around;
        None: only the function's caller is."""
        last = max((i for i in range(self.stop, len(self.block)) if loads([self.block[i]]) & made), default=-1)
        first = max((i for i in range(self.start) if stores([self.block[i]]) & given), default=self.start)
        if last >= 0 or first < self.start:
            stop = max(self.stop, last + 1)
            return Stretch(self.function, self.code, self.tree, self.around, self.block, first, stop)
        if not self.around:
            return self._to_the_end()
        *around, (block, place) = self.around
        return Stretch(self.function, self.code, self.tree, tuple(around), block, place, place + 1)

    def _to_the_end(self) -> "Stretch | None":
        """Of the function; then with all that is before, too."""
        first, last = (self.start, len(self.block)) if self.stop < len(self.block) else (0, self.stop)
        if (first, last) == (self.start, self.stop):
            return None
        return Stretch(self.function, self.code, self.tree, (), self.block, first, last)

    def statements(self, bound: Sequence[str]) -> Statements:
        """As a function of those of its names that are bound."""
        names = sorted((loads(self.inside) | set(self.outputs)) & set(bound))
        lines = [f"def region({', '.join(names)}):"]
        body = [*self.inside] if self.returning else [*self.inside, ast.parse("return locals()").body[0]]
        text = "\n".join(ast.unparse(statement) for statement in body)
        lines += [f"    {line}" for line in text.splitlines()]
        home = self.function.__globals__["__name__"]
        return Statements("\n".join(lines), home, tuple(names), None if self.returning else self.outputs)


def _own(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Nodes that are not of functions within."""
    waiting: list[ast.AST] = list(statements)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _OWN_SCOPE):
            waiting += ast.iter_child_nodes(node)


def _leaves_loop(statements: Sequence[ast.stmt]) -> bool:
    """Whether there is a break or a continue of a loop around."""
    waiting: list[ast.AST] = list(statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Break, ast.Continue)):
            return True
        if not isinstance(node, (*_OWN_SCOPE, *_LOOPS)):
            waiting += ast.iter_child_nodes(node)
        elif isinstance(node, _LOOPS):
            waiting += node.orelse
    return False


def _special(nodes: Sequence[ast.AST]) -> bool:
    return any(isinstance(node, ast.Name) and node.id in _SPECIAL for node in nodes)


def _mangled(tree: ast.FunctionDef) -> bool:
    """Names of a class's own mean something else outside of it."""
    names = {getattr(node, "id", "") or getattr(node, "attr", "") for node in ast.walk(tree)}
    return any(name.startswith("__") and not name.endswith("__") for name in names)


def _arguments(code: CodeType) -> int:
    return (
        code.co_argcount
        + code.co_kwonlyargcount
        + bool(code.co_flags & CO_VARARGS)
        + bool(code.co_flags & CO_VARKEYWORDS)
    )


def stretch_at(code: CodeType, position: tuple[int, int, int, int]) -> Stretch | None:
    """The innermost statement at this position of a function, if that can be compiled anew."""
    functions = [f for f in gc.get_referrers(code) if isinstance(f, FunctionType) and f.__code__ is code]
    if code.co_flags & CO_NESTED or len(functions) != 1:
        return None  # one of many that are made of this code
    (function,) = functions
    module = sys.modules.get(str(function.__globals__.get("__name__")))
    if module is None or vars(module) is not function.__globals__:
        return None
    tree = _function_in(code)
    if tree is None:
        return None
    around: list[tuple[list[ast.stmt], int]] = []
    found = _step(tree, position)
    while found is not None:
        around.append(found)
        found = _step(found[0][found[1]], position)
    if not around:
        return None
    *outer, (block, place) = around
    return Stretch(function, code, tree, tuple(outer), block, place, place + 1)


def _function_in(code: CodeType) -> ast.FunctionDef | None:
    for node in ast.walk(syntax_of(code.co_filename)):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _step(node: ast.AST, position: tuple[int, int, int, int]) -> tuple[list[ast.stmt], int] | None:
    """The block within a node, and the statement there, that a position is in."""
    blocks: list[Any] = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(node, "handlers", ())]
    for block in blocks:
        for number, statement in enumerate(block if isinstance(block, list) else ()):
            if covers(statement, position) and not isinstance(statement, _OWN_SCOPE):
                return block, number
    return None


def compiled(calls: Mapping[Stretch, str]) -> CodeType | None:
    """The code of a function with calls in place of stretches of it; None if it cannot be compiled to fit."""
    tree, code = next((stretch.tree, stretch.code) for stretch in calls)
    _ = [stretch.outputs for stretch in calls]  # as long as all statements are there
    removed: list[tuple[Stretch, list[ast.stmt]]] = []
    try:
        for stretch in sorted(calls, key=lambda s: -s.inside[0].lineno):  # from the end: numbers stay what they are
            inside = stretch.inside
            stretch.block[stretch.start : stretch.stop] = [_call(stretch, calls[stretch], code)]
            removed.append((stretch, inside))
        made = copy.deepcopy(tree)
    finally:
        for stretch, inside in reversed(removed):
            stretch.block[stretch.start : stretch.start + 1] = inside
    return _code_of(made, code)


def _call(stretch: Stretch, text: str, code: CodeType) -> ast.stmt:
    """`text` is an expression; names of outer functions are still seen, so that the code fits its closure."""
    kept = f", lambda: ({''.join(f'{name}, ' for name in code.co_freevars)})"
    called = f"{text[:-1]}{kept})"
    if stretch.returning:
        called = f"return {called}"
    elif stretch.outputs:
        called = f"({', '.join(stretch.outputs)},) = {called}"
    statement = ast.parse(called).body[0]
    first = stretch.inside[0]
    for node in ast.walk(statement):
        if hasattr(node, "lineno"):
            ast.copy_location(node, first)
    return statement


def _code_of(tree: ast.FunctionDef, code: CodeType) -> CodeType | None:
    tree.decorator_list, tree.returns = [], None
    arguments = tree.args
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    outer = ast.parse(f"def outer({', '.join(code.co_freevars)}):\n    pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [tree]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    made = compile(module, code.co_filename, "exec", dont_inherit=True)
    for name in ("outer", tree.name):
        made = next(inner for inner in made.co_consts if isinstance(inner, CodeType) and inner.co_name == name)
    if (
        made.co_freevars != code.co_freevars
        or made.co_varnames[: made.co_argcount] != code.co_varnames[: code.co_argcount]
    ):
        return None
    return made.replace(co_qualname=code.co_qualname)
