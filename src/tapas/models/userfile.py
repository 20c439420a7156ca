"""`file.py:function`: a user's own model and example inputs."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from tapas.errors import TapasError, nearest
from tapas.models.settings import parse

_EXAMPLE = "return (model, inputs), inputs a tuple of positional or a dict of keyword example inputs"


def load_file(source: str, options: Mapping[str, Any], settings: Mapping[str, str]) -> tuple[nn.Module, Any]:
    """Call the function; `options` go to it if it takes them, `settings` must be arguments of it."""
    path_text, _, name = source.rpartition(":") if not source.endswith(".py") else (source, "", "")
    path = Path(path_text)
    if not path.is_file():
        raise TapasError(path_text, "no such file", "give file.py:function")
    module = import_file(path)
    functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
    function = getattr(module, name, None) if name else None
    if not callable(function):
        fact = f"it has no function {name}" if name else "it does not say which function makes the model"
        raise TapasError(path_text, fact, nearest(name, functions) if functions else f"define one that will {_EXAMPLE}")
    arguments = _arguments(source, function, options, settings)
    try:
        made = function(**arguments)
    except TapasError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise _failed(path, error) from error
    return _checked(source, made)


def import_file(path: Path) -> ModuleType:
    """A file as a module, whose name is not that of the program that runs."""
    spec = importlib.util.spec_from_file_location(f"tapas_user_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise TapasError(str(path), "is not a Python file", "give file.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickling look a module up by its name
    sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` would
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        raise _failed(path, error) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _failed(path: Path, error: Exception) -> TapasError:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == path.name]
    line = frames[-1].lineno if frames else getattr(error, "lineno", None)
    place = f"{path}:{line}" if line else str(path)
    return TapasError(place, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "correct the file")


def _arguments(source: str, function: Any, options: Mapping[str, Any], settings: Mapping[str, str]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    made: dict[str, Any] = {}
    for name, value in options.items():
        if value is not None and name in parameters:
            made[name] = value
        elif value is not None and name in ("batch", "seq"):
            raise TapasError(source, f"the function takes no argument {name}", f"add it, or leave out --{name}")
    for name, text in settings.items():
        if name not in parameters and not anything:
            remedy = nearest(name, list(parameters)) if parameters else "it takes none: add it, or leave out --set"
            raise TapasError(source, f"the function takes no argument {name}", remedy)
        default = parameters[name].default if name in parameters else None
        made[name] = parse(source, name, text, None if default is inspect.Parameter.empty else default)
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in made and p.kind in (0, 1, 3)]
    if missing:
        raise TapasError(source, f"the function needs {', '.join(missing)}", "give them with --set name=value")
    return made


def _checked(source: str, made: Any) -> tuple[nn.Module, Any]:
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise TapasError(source, f"the function returned a {type(made).__name__}", _EXAMPLE)
    model, inputs = made
    if not isinstance(model, nn.Module):
        raise TapasError(source, f"the model it returned is a {type(model).__name__}", "return an nn.Module first")
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, list, Mapping)):
        raise TapasError(source, f"the inputs it returned are a {type(inputs).__name__}", _EXAMPLE)
    return model, inputs if isinstance(inputs, Mapping) else tuple(inputs)
