"""What code reads besides tensors while it runs: attributes of its modules, globals, closures, classes.

Two calls of the same code on inputs of the same shapes do the same if all of this is the same. What cannot be
compared (an iterator, an object that hides its state) is said to be unknown, and so is code that writes.
"""

import builtins
import dis
import sys
import sysconfig
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

from tapas.capture.alike import walk

_PLAIN = frozenset((
    int, float, bool, str, bytes, complex, type(None), type(...), range, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format,
))  # fmt: skip
_FIXED = (FunctionType, BuiltinFunctionType, type, ModuleType, torch.Tensor, torch._ops.OpOverload)
_STATELESS = ("typing", "types", "re", "logging", "abc", "torch", "functools", "operator", "weakref", "warnings")
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
    if isinstance(value, dict):
        return kind, tuple((frozen(k, seen), frozen(v, seen)) for k, v in value.items())
    if isinstance(value, MethodType):
        return kind, id(value.__func__), frozen(value.__self__, seen)
    if isinstance(value, partial):
        return kind, frozen((value.func, value.args, value.keywords), seen)
    if _stateless(kind) and not isinstance(value, nn.Module):
        return "is", id(value)
    if isinstance(value, nn.Module) or not hasattr(value, "__dict__") or hasattr(value, "__next__"):
        raise Unknown
    return kind, frozen(vars(value), seen)


class Kept:
    """A value as it was; compared quickly where nothing changed, which is nearly always."""

    __slots__ = ("attributes", "copy", "fixed", "others", "size", "value", "was")

    def __init__(self, value: Any, depth: int = 0) -> None:
        self.value, self.copy, self.was = value, None, None
        self.attributes: dict[str, Kept | None] | None = None  # of an object; None for what cannot be compared
        self.others: frozenset[str] = frozenset()  # attributes that it does not have and code may ask for
        self.size = 0
        self.fixed = type(value) in _PLAIN or isinstance(value, (*_FIXED, Enum))
        if self.fixed:
            return
        if _opaque(value) or depth > 6:  # objects may hold each other
            raise Unknown
        made_of_others = isinstance(value, (tuple, list, set, frozenset, dict, MethodType, partial))
        if not made_of_others and _stateless(type(value)):
            self.fixed = True
        elif not made_of_others and hasattr(value, "__dict__"):
            self.attributes = {name: _kept_or_none(own, depth + 1) for name, own in vars(value).items()}
            self.copy = _copied(vars(value))
        else:
            self.was, self.copy = frozen(value), _copied(value)

    def narrow(self, names: frozenset[str], depth: int = 0) -> None:
        """Only these attributes of an object are ever asked for."""
        if self.attributes is None or depth > 8:
            return
        kind = type(self.value)
        if kind.__getattribute__ is not object.__getattribute__ or hasattr(kind, "__getattr__"):
            names = names | self.attributes.keys()  # a name that is asked for may stand for another
        self.size = len(self.attributes)
        self.others = names - self.attributes.keys()
        self.attributes = {name: kept for name, kept in self.attributes.items() if name in names}
        for kept in self.attributes.values():
            if kept is None:
                raise Unknown
            kept.narrow(names, depth + 1)

    def same(self, value: Any) -> bool:
        if self.fixed:
            return value is self.value or (type(value) is type(self.value) in _PLAIN and value == self.value)
        if self.attributes is not None:
            if value is self.value and self.copy is not None and vars(value) == self.copy:
                return True
            return type(value) is type(self.value) and self._same_attributes(vars(value))
        if value is self.value and self.copy is not None and value == self.copy:
            return True
        try:
            return frozen(value) == self.was
        except Unknown:
            return False

    def _same_attributes(self, own: dict[str, Any]) -> bool:
        assert self.attributes is not None
        for name, kept in self.attributes.items():
            if kept is None or name not in own:
                return False
            value = own[name]
            if not (kept.fixed and value is kept.value) and not kept.same(value):
                return False
        return (len(own) == self.size and own is vars(self.value)) or self.others.isdisjoint(own)


def _kept_or_none(value: Any, depth: int) -> Kept | None:
    try:
        return Kept(value, depth)
    except Unknown:
        return None


def _opaque(value: Any) -> bool:
    """Whether a value has state that nobody can see."""
    return isinstance(value, nn.Module) or hasattr(value, "__next__")


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
    unknown: str = ""  # what cannot be compared, if something

    def same_for(self, modules: list[nn.Module]) -> bool:
        """Whether a module of the same structure, with attributes of the same names, would read the same now."""
        if self.unknown:
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
                    if differs(own[name], kept):
                        return False
        return not any(differs(again(), kept) for _, again, kept in self.names)

    def changed(self, modules: list[nn.Module]) -> str:
        """What would not be the same now."""
        own = (
            (f"{type(modules[number]).__name__}.{name}", vars(modules[number])[name], kept)
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
    made: Any = type(kind.__name__, (kind,), {**body, "__module__": kind.__module__, "__qualname__": kind.__qualname__})
    return made


@contextmanager
def _attributes(modules: list[nn.Module], seen: Seen) -> Iterator[None]:
    def noted(number: int) -> Callable[[str | None, Any], None]:
        read: dict[str, Kept] = seen.attributes.setdefault(number, {})

        def note(name: str | None, value: Any) -> None:
            if name is None:  # all of it was read, or something was written
                seen.unknown = f"all attributes of {type(modules[number]).__name__}"
            elif name not in read and name != "_tapas_watch":
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


@cache
def _foreign(filename: str) -> bool:
    """Whether code is neither of torch, nor of Python, nor ours: it may do anything."""
    return "site-packages" in filename.removeprefix(_LIBRARY[0]) or not filename.startswith((*_LIBRARY, "<"))


@cache
def _globals_of(code: CodeType) -> tuple[frozenset[str], bool]:
    """Names that code reads from outside, and whether it writes there."""
    read, writes = set(), False
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(step.argval)
        elif step.opname in ("STORE_DEREF", "DELETE_DEREF"):
            writes |= step.argval in code.co_freevars
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            writes = True
    return frozenset(read), writes


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
        if event != "call" or code in self.done or not _foreign(code.co_filename):
            return
        self.done.add(code)
        names, writes = _globals_of(code)
        if writes:
            self.seen.unknown = f"what {code.co_qualname} writes"
        self.names.update(code.co_names)
        self.names.update(text for text in code.co_consts if type(text) is str)  # as in getattr(x, "name")
        for name in names:
            if name in frame.f_globals:
                self.keep((id(frame.f_globals), name), partial(frame.f_globals.get, name), code)
            elif not hasattr(builtins, name):
                self.seen.unknown = f"{name} in {code.co_qualname}"
        for name in code.co_freevars:
            if name in frame.f_locals and name != "__class__":
                value = frame.f_locals[name]
                self.keep((code, name), lambda value=value: value, code)

    def keep(self, key: Any, again: Callable[[], Any], code: CodeType) -> None:
        """What some code reads."""
        if key in self.known:
            return
        self.known.add(key)
        value = again()
        if isinstance(value, FunctionType):
            self.keep_function(value)
        elif isinstance(value, type):
            self.keep_class(value)
        elif isinstance(value, ModuleType):
            self.keep_module(value, code)
        elif not isinstance(value, _FIXED):
            name = f"{key[-1]} in {code.co_qualname}"
            self.of_functions.append((code, name, again, _kept(value, name)))

    def keep_module(self, module: ModuleType, code: CodeType) -> None:
        if module.__name__ in _CHANGING or (module.__name__ == "numpy" and "random" in code.co_names):
            self.seen.unknown = f"what {module.__name__} returns"
        elif _foreign(getattr(module, "__file__", None) or "<builtin>"):
            for name in code.co_names:
                if not isinstance(vars(module).get(name), ModuleType):
                    self.keep((id(vars(module)), name), partial(vars(module).get, name), code)

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

    def finish(self) -> None:
        counted = [found for found in self.of_classes if found[0] in self.names]
        counted += [(name, again, kept) for code, name, again, kept in self.of_functions if code in self.done]
        for name, again, kept in counted:
            if isinstance(kept, str):
                self.seen.unknown = kept
            else:
                self.seen.names.append((name, again, kept))
        asked = frozenset(self.names)
        everything = not asked.isdisjoint(("__dict__", "vars"))
        own = ((name, kept) for read in self.seen.attributes.values() for name, kept in read.items())
        for name, kept in (*own, *((name, kept) for name, _, kept in self.seen.names)):
            try:
                kept.narrow(asked | (vars(kept.value).keys() if everything and kept.attributes is not None else set()))
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
    with _attributes(modules, seen):
        sys.setprofile(code.called)
        try:
            yield seen
        finally:
            sys.setprofile(before)
    code.finish()
