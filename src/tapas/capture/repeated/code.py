"""What code reads outside of itself while it runs: globals, closures, classes, defaults, modules."""

import builtins
import dis
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch._subclasses import FakeTensor

from tapas.capture.repeated.kept import FIXED, PLAIN, Kept, Unknown, bound, stateless
from tapas.capture.repeated.seen import Seen

_CHANGING = ("random", "time", "secrets", "uuid", "datetime", "os")  # modules whose functions do not just compute
_DESCRIPTORS = (FunctionType, classmethod, staticmethod, property, type, BuiltinFunctionType)

_LIBRARY = tuple(
    os.path.realpath(place) + os.sep
    for place in (Path(torch.__file__).parent, sysconfig.get_paths()["stdlib"], Path(__file__).parents[2])
)


def _home(code: CodeType, frame: FrameType) -> str:
    """The file that code belongs to: what a program made (a dataclass's methods) to that of its globals."""
    if code.co_filename.startswith("<") and "__file__" in frame.f_globals:
        return str(frame.f_globals["__file__"])
    return code.co_filename


@cache
def _foreign(filename: str) -> bool:
    """Whether code is neither of torch, nor of Python, nor ours: it may do anything."""
    if filename.startswith("<"):  # typed in, or made by a program
        return not filename.startswith("<frozen")
    filename = os.path.realpath(filename)  # an environment may be reached through a link
    if not filename.startswith(_LIBRARY):
        return True
    return "site-packages" in filename and not filename.startswith((_LIBRARY[0], _LIBRARY[2]))


@cache
def _globals_of(code: CodeType) -> tuple[frozenset[str], frozenset[str], bool]:
    """Names that code reads from outside, modules that it imports, and whether it writes there."""
    read, imported, writes = set(), set(), False
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            imported.add(step.argval)
        elif step.opname in ("STORE_DEREF", "DELETE_DEREF"):
            writes |= step.argval in code.co_freevars
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            writes = True
    return frozenset(read), frozenset(imported), writes


def _texts(constants: Iterable[Any]) -> Iterator[str]:
    for value in constants:
        if type(value) is str:
            yield value
        elif type(value) in (tuple, frozenset):
            yield from _texts(value)


_BY_NAME = ("__getattribute__", "__getattr__")  # methods that look one name up, whatever else there is


class Code:
    """All code that ran, with what it could read outside of itself, as that was before it ran."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.done: set[CodeType] = set()
        self.names: set[str] = set()
        self.known: set[Any] = set()
        # what belongs to a class counts if code uses its name, what belongs to a function if that has run
        self.of_classes: list[tuple[str, Callable[[], Any], Kept | str]] = []
        self.of_functions: list[tuple[CodeType, str, Callable[[], Any], Kept | str]] = []

    def called(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not _foreign(_home(code, frame)):
            return
        for name in code.co_freevars:  # functions of the same code may have other closures
            if name in frame.f_locals and name != "__class__":
                value = frame.f_locals[name]
                self.keep((code, name, id(value)), lambda value=value: value, code)
        if code in self.done:
            return
        self.done.add(code)
        names, imported, writes = _globals_of(code)
        if writes:
            self.seen.unknown = f"what {code.co_qualname} writes"
        used = {*code.co_names, *_texts(code.co_consts)}  # as in getattr(x, "name")
        self.names |= used - {"__dict__"} if code.co_name in _BY_NAME else used
        for name in names:
            if name in frame.f_globals:
                self.keep((id(frame.f_globals), name), partial(frame.f_globals.get, name), code)
            elif not hasattr(builtins, name):
                self.seen.unknown = f"{name} in {code.co_qualname}"
            elif name in ("type", "vars", "globals", "locals", "open", "input", "eval", "exec"):
                self.seen.unknown = f"what {name}() tells {code.co_qualname}"  # not the same when watched, or unseen
        for name in imported:
            if name in sys.modules:
                self.keep_module(sys.modules[name], code)
            elif name:
                self.seen.unknown = f"the import of {name}"

    def keep(self, key: Any, again: Callable[[], Any], code: CodeType) -> None:
        """What some code reads."""
        if key in self.known:
            return
        self.known.add(key)
        value = again()
        changing = getattr(value, "__module__", None) if isinstance(value, BuiltinFunctionType) else None
        owner = getattr(value, "__self__", None) if isinstance(value, (MethodType, BuiltinFunctionType)) else None
        if changing in _CHANGING or type(owner).__module__.partition(".")[0] in (*_CHANGING, "numpy", "_random"):
            self.seen.unknown = f"what {key[-1]} returns"
        elif isinstance(value, FunctionType):
            self.keep_function(value)
        elif isinstance(value, type):
            self.keep_class(value)
        elif isinstance(value, ModuleType):
            self.keep_module(value, code)
        elif not isinstance(value, FIXED) or bound(value) or isinstance(value, FakeTensor):
            name = f"{key[1] if len(key) > 1 else key} in {code.co_qualname}"
            kept = _kept(value, name)
            self.of_functions.append((code, name, again, kept))
            if isinstance(kept, Kept):
                self.keep_classes(kept)

    def keep_module(self, module: ModuleType, code: CodeType) -> None:
        if (id(module), code) in self.known:
            return
        self.known.add((id(module), code))
        if module.__name__ in _CHANGING or (module.__name__ == "numpy" and "random" in code.co_names):
            self.seen.unknown = f"what {module.__name__} returns"
        elif _foreign(getattr(module, "__file__", None) or "<frozen>"):
            for name in code.co_names:
                if name in vars(module):
                    self.keep((id(vars(module)), name), partial(vars(module).get, name), code)

    def attribute(self, value: Any) -> None:
        """What a module's attribute leads to."""
        if isinstance(value, FunctionType):
            self.keep_function(value)
        elif isinstance(value, MethodType):
            self.keep_function(value.__func__) if isinstance(value.__func__, FunctionType) else None
        elif isinstance(value, (type, ModuleType)):
            self.seen.unknown = "a class or module as an attribute"
        elif not isinstance(value, FIXED) and type(value) not in PLAIN:
            self.keep_class(type(value))

    def keep_classes(self, kept: Kept) -> None:
        for kind in kept.classes():
            self.keep_class(kind)

    def keep_class(self, known: type) -> None:
        for kind in known.__mro__:
            if kind in self.known or stateless(kind) or kind.__module__ == "builtins":
                continue
            self.known.add(kind)
            for name, value in vars(kind).items():
                if isinstance(value, FunctionType):
                    self.keep_function(value)
                elif not name.startswith("__") and not isinstance(value, _DESCRIPTORS):
                    self.of_classes.append((name, partial(vars(kind).get, name), _kept(value, name)))

    def keep_function(self, function: FunctionType) -> None:
        if function in self.known:
            return
        self.known.add(function)
        for number, cell in enumerate(function.__closure__ or ()):
            again = partial(getattr, cell, "cell_contents")
            try:
                self.keep((function, number), again, function.__code__)
            except ValueError:  # empty so far
                name = f"a variable of {function.__qualname__}"
                self.of_functions.append((function.__code__, name, again, name))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.keep((function, id(value)), lambda value=value: value, function.__code__)
        for name in vars(function):
            self.keep((function, name), partial(vars(function).get, name), function.__code__)

    def finish(self) -> None:
        counted = [found for found in self.of_classes if found[0] in self.names]
        counted += [(name, again, kept) for code, name, again, kept in self.of_functions if code in self.done]
        for name, again, kept in counted:
            if isinstance(kept, str):
                self.seen.unknown = kept
            else:
                self.seen.names.append((name, again, kept))
        inside = {text for code in self.done for text in code.co_consts if isinstance(text, CodeType)}
        reached = {function.__code__ for function in self.known if isinstance(function, FunctionType)}
        for code in self.done - reached - inside:  # of a function that nobody found, and so not its variables
            if code.co_freevars not in ((), ("__class__",)):
                self.seen.unknown = f"variables of {code.co_qualname}"
        own = ((name, kept) for read in self.seen.attributes.values() for name, kept in read.items())
        for name, kept in (*own, *((name, kept) for name, _, kept in self.seen.names)):
            try:
                kept.narrow(self.names)
            except Unknown:
                self.seen.unknown = name


def _kept(value: Any, name: str) -> Kept | str:
    """The value as it is; if that cannot be compared later, what it is."""
    try:
        return Kept(value)
    except Unknown:
        return f"{name}, a {type(value).__name__}"
