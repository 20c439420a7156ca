"""What code reads besides tensors while it runs: attributes of its modules, globals, closures, classes.

Two calls of the same code on inputs of the same shapes do the same if all of this is the same. What cannot be
compared (an iterator, an object that hides its state) is said to be unknown, and so is code that writes.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn

from tapas.capture.repeated.code import Code
from tapas.capture.repeated.kept import Kept, Unknown
from tapas.capture.repeated.seen import Seen
from tapas.capture.repeated.structure import walk

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
def _attributes(modules: list[nn.Module], seen: Seen, code: Code) -> Iterator[None]:
    known: dict[int, Kept] = {}  # a configuration is an attribute of many; they keep it alive

    def keep(value: Any) -> Kept:
        if id(value) not in known:
            profile = sys.getprofile()
            sys.setprofile(None)  # nobody watches us
            try:
                known[id(value)] = Kept(value)
                code.keep_classes(known[id(value)])
            finally:
                sys.setprofile(profile)
        return known[id(value)]

    def noted(number: int) -> Callable[[str | None, Any], None]:
        read: dict[str, Kept] = seen.attributes.setdefault(number, {})

        def note(name: str | None, value: Any) -> None:
            if name is None:  # all of it was read, or something was written
                seen.unknown = f"all attributes of {type(modules[number]).__name__}"
            elif name not in read and name != "_tapas_watch":
                code.attribute(value)
                try:
                    read[name] = keep(value)
                except Unknown:
                    seen.unknown = f"attribute {name} of {type(modules[number]).__name__}"

        return note

    classes = [type(module) for module in modules]
    before = [dict(vars(module)) for module in modules]
    recorders = {_recorder(kind): None for kind in classes}
    written = {recorder: set(vars(recorder)) for recorder in recorders}
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
            for name in set(vars(recorder)) - written[recorder]:
                seen.unknown = f"{name}, which {recorder.__name__} writes to its class"
                delattr(recorder, name)


@contextmanager
def watching(module: nn.Module) -> Iterator[Seen]:
    """What is read while this runs; complete once it has ended."""
    modules, seen = walk(module), Seen()
    code = Code(seen)
    for kind in dict.fromkeys(map(type, modules)):
        code.keep_class(kind)
    before = sys.getprofile()
    seen.training = [vars(module)["training"] for module in modules]
    with _attributes(modules, seen, code):
        sys.setprofile(code.called)
        try:
            yield seen
        finally:
            sys.setprofile(before)
    code.finish()
