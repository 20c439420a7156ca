"""Users' own `torch.autograd.Function`s as one operator, `tapas.function`: it is called as it was, backward and all.

The operator names the function and tells its arguments, with places for tensors, as text: a graph holds no objects.
"""

# torch gives its decorators no types.
# pyright: reportUnknownMemberType=false

import ast
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from tapas.errors import GraphError

TARGET = "tapas.function.default"
_functions: dict[str, Any] = {}  # by name, as they were met


def function_name(function: Any) -> str:
    """What a function is called in graphs; its class is remembered."""
    path, number = f"{function.__module__}:{function.__qualname__}", 1
    name = path
    while _functions.setdefault(name, function) is not function:
        number += 1
        name = f"{path}#{number}"
    return name


def _function(name: str) -> Any:
    if name not in _functions:
        module, _, path = name.partition(":")
        try:
            found: Any = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            remedy = "define it in a module that can be imported; or verify in one process (in_process=True)"
            raise GraphError(name, "this torch.autograd.Function cannot be found in another process", remedy) from None
        _functions[name] = found
    return _functions[name]


@dataclass(frozen=True)
class Template:
    """Arguments, by position and by name, with places for tensors; `str` and `parse` are inverse to each other."""

    tree: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Template":
        count = 0

        def place(tree: Any) -> Any:
            nonlocal count
            if isinstance(tree, Tensor):
                count += 1
                return ("tensor", count - 1)
            if isinstance(tree, torch.dtype):
                return ("dtype", str(tree).removeprefix("torch."))
            if isinstance(tree, dict):
                return ("dict", [(key, place(item)) for key, item in cast(dict[str, Any], tree).items()])
            if isinstance(tree, (list, tuple)):
                items = cast(list[Any], tree)
                return (type(items).__name__, [place(item) for item in items])
            return ("value", repr(tree))

        return cls(place((args, kwargs)))

    def __str__(self) -> str:
        return repr(self.tree)

    @classmethod
    def parse(cls, text: str) -> "Template":
        return cls(ast.literal_eval(text))

    def filled(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def fill(tree: Any) -> Any:
            kind, what = cast(tuple[str, Any], tree)
            match kind:
                case "tensor":
                    return tensors[int(what)]
                case "dtype":
                    return getattr(torch, what)
                case "dict":
                    return {key: fill(item) for key, item in what}
                case "list":
                    return [fill(item) for item in what]
                case "tuple":
                    return tuple(fill(item) for item in what)
                case _:
                    return float(what) if what in ("inf", "-inf", "nan") else ast.literal_eval(what)

        return fill(self.tree)


@cache
def _template(text: str) -> Template:
    """Parsed once: ranks may be threads, in which Python must not parse at the same time."""
    return Template.parse(text)


_apply = cast(Any, torch.autograd.Function.apply).__func__  # capture puts another one in its place
_running = threading.local()  # its `depth` says how many functions run as they are


def run_as_it_is(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A function, also while a model is captured: then whatever it calls is its own business."""
    _running.depth = running_as_it_is() + 1
    try:
        return _apply(function, *args, **kwargs)
    finally:
        _running.depth -= 1


def running_as_it_is() -> int:
    return getattr(_running, "depth", 0)


_single: dict[tuple[str, str], bool] = {}  # whether a call returns a tensor rather than a tuple


def apply_function(tensors: Sequence[Tensor], name: str, arguments: str) -> list[Tensor]:
    """What the operator does: the function itself, gradients included."""
    args, kwargs = _template(arguments).filled(tensors)
    returned = run_as_it_is(_function(name), *args, **kwargs)
    _single[name, arguments] = isinstance(returned, Tensor)
    results = cast(list[Any], [returned] if isinstance(returned, Tensor) else list(returned))
    if not all(isinstance(result, Tensor) for result in results):
        raise GraphError(name, "this torch.autograd.Function returns what is no tensor", "return tensors only")
    return results


@torch.library.custom_op("tapas::function", mutates_args=())
def _operator(tensors: list[Tensor], name: str, arguments: str) -> list[Tensor]:
    return [result.detach().clone() for result in apply_function(tensors, name, arguments)]


@_operator.register_fake
def _(tensors: list[Tensor], name: str, arguments: str) -> list[Tensor]:
    return [torch.empty_like(result) for result in apply_function(tensors, name, arguments)]


def record(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """One call of the operator in place of the function's; what that returns."""
    name, arguments = function_name(function), str(Template.of(args, kwargs))
    results = torch.ops.tapas.function(tensors, name, arguments)
    return results[0] if _single[name, arguments] else tuple(results)
