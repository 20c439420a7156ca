"""Where a model checks values: `assert`, `if ...: raise`, and what torch and transformers have for it.

Capture computes without values. A question that only an assertion asks is answered as the assertion wants it: a model
that passes its checks computes the same without them. Those whose tensors have known values are made again at every
call (ir/known.py); of others the plan says that they are left out. Any other question keeps its own answer.
"""

import ast
import inspect
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch

from tapas._torch import distributions_unchecked, tensor_checks_replaced
from tapas.capture.side_effects import CAPTURED

DROPPED = "a check of the model's own on values is left out"
ASSERTED_ONCE = "a check of the model's own is made on the example inputs only"
FOLLOWED = "forward_with_known_values"  # the function of ours that calls the model
_OURS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "<")


@dataclass(frozen=True, slots=True)
class Question:
    """What an assertion asks; `wanted`: the answer that lets it pass, None inside of a comparison."""

    wanted: bool | None
    raised: str  # the exception otherwise


def of_model(path: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    return not path.startswith(_OURS)


def user_frame() -> FrameType | None:
    """The innermost one that is neither torch's nor ours."""
    frames = (frame for frame, _ in traceback.walk_stack(inspect.currentframe()))
    return next((f for f in frames if not f.f_code.co_filename.startswith(_OURS)), None)


def question() -> Question | None:
    """What is asked by the code that waits for an answer now, if it is an assertion that asks."""
    frame = user_frame()
    position = position_in(frame.f_code, frame.f_lasti) if frame is not None else None
    if frame is None or position is None:
        return None
    found = _asked(frame.f_code.co_filename, position)
    return None if found is None or _caught(frame, found.raised) else found


def position_in(code: CodeType, instruction: int) -> tuple[int, int, int, int] | None:
    """Of an instruction in its file."""
    found = next(islice(code.co_positions(), instruction // 2, None), None)
    if found is None or any(number is None for number in found):
        return None
    line, last, column, end = found
    return line, column, last, end  # type: ignore[return-value]


@cache
def syntax_of(path: str) -> ast.AST:
    try:
        with open(path, encoding="utf-8") as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


@cache
def _checks(path: str) -> tuple[ast.Assert | ast.If, ...]:
    """The statements of a file that check something, and nothing else."""
    found = (node for node in ast.walk(syntax_of(path)) if isinstance(node, ast.Assert) or _raises(node))
    named = lambda node: any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node.test))  # noqa: E731
    return tuple(node for node in found if not named(node))  # type: ignore[misc]


def _raises(node: ast.AST) -> bool:
    """`if ...: raise`, whatever else would be: nothing that is kept happens before."""
    if not isinstance(node, ast.If) or not isinstance(node.body[-1], ast.Raise):
        return False
    return all(isinstance(statement, (ast.Raise, ast.Assign, ast.Expr)) for statement in node.body)


@cache
def _asked(path: str, position: tuple[int, int, int, int]) -> Question | None:
    for statement in _checks(path):
        passes = isinstance(statement, ast.Assert)
        if _extent(statement) == position:  # before Python 3.12 a jump stands for all of its statement
            answers = set(_answers(statement.test, passes))
            return Question(answers.pop() if len(answers) == 1 else None, _raised(statement))
        if covers(statement.test, position):
            return Question(_wanted(statement.test, position, passes), _raised(statement))
    return None


def _answers(test: ast.expr, passes: bool) -> Iterator[bool]:
    """The answers with which a condition passes, of those of its parts that may be tensors. A wrong one would be
    refused: the check itself would then fail."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _answers(test.operand, not passes)
    elif isinstance(test, ast.BoolOp):
        calling = [value for value in test.values if any(isinstance(node, ast.Call) for node in ast.walk(value))]
        for value in calling or test.values:
            yield from _answers(value, passes)
    else:
        yield passes


def _raised(statement: ast.Assert | ast.If) -> str:
    if isinstance(statement, ast.Assert):
        return "AssertionError"
    made: Any = statement.body[-1]
    named = made.exc.func if isinstance(made.exc, ast.Call) else made.exc
    return getattr(named, "id", "Exception")


def _caught(frame: FrameType | None, raised: str) -> bool:
    """Whether the model's code around would go on with something else: then it is no check."""
    while frame is not None and frame.f_code.co_name != FOLLOWED:
        path, position = frame.f_code.co_filename, position_in(frame.f_code, frame.f_lasti)
        if not path.startswith(_OURS) and position is not None and _catches(path, position, raised):
            return True
        frame = frame.f_back
    return False


@cache
def _catches(path: str, position: tuple[int, int, int, int], raised: str) -> bool:
    for node in ast.walk(syntax_of(path)):
        if isinstance(node, ast.Try) and any(covers(statement, position) for statement in node.body):
            for handler in node.handlers:
                if _kinds(handler) & {raised, "Exception", "BaseException", ""} and not _again(handler):
                    return True
    return False


def _kinds(handler: ast.ExceptHandler) -> set[str]:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {getattr(kind, "id", "") if kind is not None else "" for kind in kinds}


def _again(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise)


def covers(node: ast.AST, position: tuple[int, int, int, int]) -> bool:
    start, end = position[:2], position[2:]
    extent = _extent(node)
    return extent[:2] <= start and end <= extent[2:]


def _extent(node: Any) -> tuple[int, int, int, int]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _wanted(test: ast.expr, position: tuple[int, int, int, int], passes: bool) -> bool | None:
    """The truth of the part of a condition at a position with which the condition passes."""
    if _extent(test) == position:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return not passes  # it is its operand that is asked
        return None if _number(test) else passes
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _wanted(test.operand, position, not passes)
    if isinstance(test, ast.BoolOp):
        part = next((value for value in test.values if covers(value, position)), None)
        return None if part is None else _wanted(part, position, passes)
    return None


def _number(node: ast.expr) -> bool:
    """A call whose result is a number of Python's, which is asked next."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("item", "tolist")


@contextmanager
def assertions_answered(values: Any, place: Any, notes: list[str]) -> Iterator[None]:
    """Within, checks of tensors are those of `values`, or are left out; so are conditions of numbers without value."""

    def checked(plain: Any, kind: Any, condition: Any, message: Any = None) -> None:
        if not isinstance(condition, torch.Tensor) or not (condition.is_meta or isinstance(condition, CAPTURED)):
            return plain(kind, condition, message)
        known = values.of(condition)
        if known is None:
            notes.append(f"{place()}: {DROPPED}")
        elif not known.all():
            raise kind(message() if message is not None else "a check fails")
        else:
            values.read(known, asserted=True)

    def truth(plain: Any, number: Any) -> bool:
        asked = question()
        if asked is None or asked.wanted is None:
            return plain(number)
        try:
            return plain(number)
        except Exception:  # it has no value
            notes.append(f"{place()}: {DROPPED}")
            return asked.wanted

    def unchecked() -> None:
        notes.append(f"{place()}: torch.distributions does not check the values of its arguments")

    with tensor_checks_replaced(checked, truth), distributions_unchecked(unchecked):
        yield
