"""What code reads besides tensors while it runs: attributes of its modules, globals, closures, classes.

Two calls of the same code on inputs of the same shapes do the same if all of this is the same. What cannot be
compared (an iterator, an object that hides its state) is said to be unknown, and so is code that writes.
"""

import builtins
import dis
import os
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from tapas.capture.alike import walk

_PLAIN = frozenset((
    int, float, bool, str, bytes, complex, type(None), type(...), range, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format,
))  # fmt: skip
_FIXED = (FunctionType, BuiltinFunctionType, type, ModuleType, torch.Tensor, torch._ops.OpOverload)
_STATELESS = ("typing", "re", "logging", "abc", "torch", "functools", "operator", "warnings")
_CHANGING = ("random", "time", "secrets", "uuid", "datetime", "os")  # modules whose functions do not just compute
_DESCRIPTORS = (FunctionType, classmethod, staticmethod, property, type, BuiltinFunctionType)


class Unknown(Exception):
    """Nobody can tell whether this is the same the next time."""


def _stateless(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _STATELESS


def frozen(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """Equal for two values exactly if code that reads them cannot tell them apart."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, Enum):
        return kind, value
    if isinstance(value, _FIXED):
        if _bound(value):
            raise Unknown
        return "is", id(value)
    if id(value) in seen:
        return "again", seen.index(id(value))
    seen = (*seen, id(value))
    if len(seen) > 8:
        raise Unknown
    if kind in (tuple, list):
        return kind, tuple(frozen(item, seen) for item in value)
    if kind in (set, frozenset):
        return kind, frozenset(frozen(item, seen) for item in value)
    if kind in (dict, OrderedDict):
        return kind, tuple((frozen(k, seen), frozen(v, seen)) for k, v in value.items())
    if isinstance(value, MethodType):
        return kind, id(value.__func__), frozen(value.__self__, seen)
    if isinstance(value, partial):
        return kind, frozen((value.func, value.args, value.keywords), seen)
    if _stateless(kind) and not isinstance(value, nn.Module):
        return "is", id(value)
    if _opaque(value):
        raise Unknown
    return kind, frozen(vars(value), seen)


class Kept:
    """A value as it was; compared quickly where nothing changed, which is nearly always."""

    __slots__ = ("attributes", "copy", "fixed", "types", "value", "was")

    def __init__(self, value: Any, depth: int = 0) -> None:
        self.value, self.copy, self.was = value, None, None
        self.attributes: dict[str, Kept | None] | None = None  # of an object; None for what cannot be compared
        self.types: list[type] = []
        self.fixed = type(value) in _PLAIN or isinstance(value, (*_FIXED, Enum))
        if self.fixed:
            if _bound(value) or isinstance(value, FakeTensor):
                raise Unknown
            return
        if _opaque(value) or depth > 6:  # objects may hold each other
            raise Unknown
        made_of_others = type(value) in (tuple, list, set, frozenset, dict, OrderedDict, MethodType, partial)
        if not made_of_others and _stateless(type(value)):
            self.fixed = True
        elif not made_of_others:
            self.attributes = {name: _kept_or_none(own, depth + 1) for name, own in vars(value).items()}
            self.copy = _copied(vars(value))
            self.types = list(map(type, vars(value).values()))
        else:
            self.was, self.copy = frozen(value), _copied(value)

    def narrow(self, names: set[str], depth: int = 0) -> None:
        """What cannot be compared of an object does not count if code never asks for it."""
        if self.attributes is None or depth > 8:
            return
        for name, kept in self.attributes.items():
            if kept is None and name in names:
                raise Unknown
            if kept is not None:
                kept.narrow(names, depth + 1)

    def same(self, value: Any) -> bool:
        if self.fixed:
            return value is self.value or (type(value) is type(self.value) in _PLAIN and value == self.value)
        if self.attributes is not None:
            if type(value) is not type(self.value):
                return False
            own = vars(value)
            if value is self.value and self.copy is not None and own == self.copy:
                return list(map(type, own.values())) == self.types
            return self._same_attributes(own)
        if value is self.value and self.copy is not None and value == self.copy and type(value) is tuple:
            return True
        try:
            return frozen(value) == self.was
        except Unknown:
            return False

    def _same_attributes(self, own: dict[str, Any]) -> bool:
        assert self.attributes is not None
        if own.keys() != self.attributes.keys():
            return False
        for name, kept in self.attributes.items():
            if kept is not None and not (kept.fixed and own[name] is kept.value) and not kept.same(own[name]):
                return False
        return True


def _kept_or_none(value: Any, depth: int) -> Kept | None:
    try:
        return Kept(value, depth)
    except Unknown:
        return None


def _opaque(value: Any) -> bool:
    """Whether a value may have state that nobody can see."""
    kind = type(value)
    if kind in (tuple, list, set, frozenset, dict, OrderedDict, MethodType, partial) or _stateless(kind):
        return False
    if isinstance(value, nn.Module) or hasattr(value, "__next__") or not hasattr(value, "__dict__"):
        return True
    # only what classes written in Python keep in __dict__ can be seen
    return any(not base.__flags__ & _HEAP or vars(base).get("__slots__") for base in kind.__mro__[:-1])


_HEAP = 1 << 9  # of a class that was made by a class statement


def _bound(value: Any) -> bool:
    """Whether a builtin function is a method of some object."""
    owner = getattr(value, "__self__", None) if isinstance(value, BuiltinFunctionType) else None
    return not (owner is None or isinstance(owner, (ModuleType, type)))


def _copied(value: Any) -> Any:
    """Equal to the value until something in it changes; None where it takes more than that to know."""
    if type(value) in _PLAIN or isinstance(value, (*_FIXED, Enum)):
        return value
    if type(value) in (list, tuple, set, frozenset):
        items = [_copied(item) for item in value]
        known = all(copy is not None or item is None for copy, item in zip(items, value, strict=True))
        return type(value)(items) if known and torch.Tensor not in map(type, items) else None
    if type(value) is dict:
        copies = {key: _copied(item) for key, item in value.items()}
        known = all(copies[key] is not None or item is None for key, item in value.items())
        return copies if known and torch.Tensor not in map(type, copies.values()) else None
    return None


@dataclass
class Seen:
    """What one run of a module read, as it was then."""

    attributes: dict[int, dict[str, Kept]] = field(default_factory=dict)  # by number of the submodule
    names: list[tuple[str, Callable[[], Any], Kept]] = field(default_factory=list)  # and how to read it again
    training: list[bool] = field(default_factory=list)  # of the module and all below
    unknown: str = ""  # what cannot be compared, if something

    def same_for(self, modules: list[nn.Module]) -> bool:
        """Whether a module of the same structure, with attributes of the same names, would read the same now."""
        if self.unknown or self.training != [vars(module)["training"] for module in modules]:
            return False
        compared: set[int] = set()  # a configuration is an attribute of many

        def differs(value: Any, kept: Kept) -> bool:
            if value is kept.value and (kept.fixed or id(value) in compared):
                return False
            compared.add(id(value))
            return not kept.same(value)

        for number, read in self.attributes.items():
            if read:
                own = vars(modules[number])
                for name, kept in read.items():
                    if name not in own or differs(own[name], kept):
                        return False
        return not any(differs(again(), kept) for _, again, kept in self.names)

    def changed(self, modules: list[nn.Module]) -> str:
        """What would not be the same now."""
        own = (
            (f"{type(modules[number]).__name__}.{name}", vars(modules[number]).get(name), kept)
            for number, read in self.attributes.items()
            for name, kept in read.items()
        )
        others = ((name, again(), kept) for name, again, kept in self.names)
        return ", ".join(name for name, value, kept in (*own, *others) if not kept.same(value))


# ---------------------------------------------------------------------------------------------
# Attributes of modules


_OWN = frozenset(vars(nn.Module())) | {"__dict__", "__class__"}


@cache
def _recorder(kind: type) -> type:
    """A subclass that writes down which attributes are read."""

    def __getattribute__(self: Any, name: str) -> Any:
        if name == "__class__":
            return kind
        own = object.__getattribute__(self, "__dict__")
        note = own.get("_tapas_watch")
        if note is not None and name in own and name not in _OWN:
            note(name, own[name])
        if note is not None and name == "__dict__":
            note(None, None)
        return super(made, self).__getattribute__(name)

    def __getattr__(self: Any, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        for held in ("_parameters", "_buffers", "_modules"):
            if name in own[held]:
                return own[held][name]
        if kind.__getattr__ is nn.Module.__getattr__:  # which would look at all attributes
            raise AttributeError(f"'{kind.__name__}' object has no attribute '{name}'")
        return super(made, self).__getattr__(name)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        note = object.__getattribute__(self, "__dict__").get("_tapas_watch")
        if note is not None:
            note(None, None)
        super(made, self).__setattr__(name, value)

    body = {"__getattribute__": __getattribute__, "__getattr__": __getattr__, "__setattr__": __setattr__}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: Any = type(kind.__name__, (kind,), body | names)
    return made


@contextmanager
def _attributes(modules: list[nn.Module], seen: Seen, found: Callable[[Any], None]) -> Iterator[None]:
    def noted(number: int) -> Callable[[str | None, Any], None]:
        read: dict[str, Kept] = seen.attributes.setdefault(number, {})

        def note(name: str | None, value: Any) -> None:
            if name is None:  # all of it was read, or something was written
                seen.unknown = f"all attributes of {type(modules[number]).__name__}"
            elif name not in read and name != "_tapas_watch":
                found(value)
                try:
                    read[name] = Kept(_unbound(value, modules[number]))
                except Unknown:
                    seen.unknown = f"attribute {name} of {type(modules[number]).__name__}"

        return note

    classes = [type(module) for module in modules]
    before = [dict(vars(module)) for module in modules]
    recorders = {_recorder(kind): None for kind in classes}
    known = {recorder: set(vars(recorder)) for recorder in recorders}
    try:
        for number, module in enumerate(modules):
            vars(module)["_tapas_watch"] = noted(number)
            object.__setattr__(module, "__class__", _recorder(type(module)))
        yield
    finally:
        for module, kind, own in zip(modules, classes, before, strict=True):
            object.__setattr__(module, "__class__", kind)
            vars(module).clear()  # whatever the run has written is undone
            vars(module).update(own)
        for recorder in recorders:
            for name in set(vars(recorder)) - known[recorder]:
                seen.unknown = f"{name}, which {recorder.__name__} writes to its class"
                delattr(recorder, name)


def _unbound(value: Any, module: nn.Module) -> Any:
    """A method that was bound to the module itself belongs to each copy in the same way; no copy has another's."""
    if isinstance(value, MethodType) and value.__self__ is module:
        raise Unknown
    return value


# ---------------------------------------------------------------------------------------------
# Globals, closures and classes of the code that runs


_LIBRARY = tuple(
    str(Path(place).resolve()) for place in (Path(torch.__file__).parent, sysconfig.get_paths()["stdlib"])
) + (str(Path(__file__).resolve().parents[1]),)


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
    if not filename.startswith(tuple(f"{place}{os.sep}" for place in _LIBRARY)):
        return True
    return "site-packages" in filename and not filename.startswith((f"{_LIBRARY[0]}{os.sep}", f"{_LIBRARY[2]}{os.sep}"))


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


class _Code:
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
        self.names.update(code.co_names)
        self.names.update(text for text in code.co_consts if type(text) is str)  # as in getattr(x, "name")
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
        elif not isinstance(value, _FIXED) or _bound(value) or isinstance(value, FakeTensor):
            name = f"{key[1] if len(key) > 1 else key} in {code.co_qualname}"
            kept = _kept(value, name)
            self.of_functions.append((code, name, again, kept))
            if isinstance(kept, Kept) and kept.attributes is not None:
                self.keep_class(type(value))

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
        elif not isinstance(value, _FIXED) and type(value) not in _PLAIN:
            self.keep_class(type(value))

    def keep_class(self, known: type) -> None:
        for kind in known.__mro__:
            if kind in self.known or _stateless(kind) or kind.__module__ == "builtins":
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


@contextmanager
def watching(module: nn.Module) -> Iterator[Seen]:
    """What is read while this runs; complete once it has ended."""
    modules, seen = walk(module), Seen()
    code = _Code(seen)
    for kind in dict.fromkeys(map(type, modules)):
        code.keep_class(kind)
    before = sys.getprofile()
    seen.training = [vars(module)["training"] for module in modules]
    with _attributes(modules, seen, code.attribute):
        sys.setprofile(code.called)
        try:
            yield seen
        finally:
            sys.setprofile(before)
    code.finish()
