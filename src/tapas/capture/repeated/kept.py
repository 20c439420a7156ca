"""Values as they were, to be compared with what they are later.

Two values are the same if code that reads them cannot tell them apart. Of what hides its state (an iterator, a
class with slots, a subclass of a builtin) nobody can tell: it is unknown.
"""

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.guards import dict_version  # another one after every change; no public way to tell
from torch._subclasses import FakeTensor

PLAIN = frozenset((
    int, float, bool, str, bytes, complex, type(None), type(...), range, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format,
))  # fmt: skip
SIGNED = frozenset((float, complex))  # of which 0.0 and -0.0 are equal, but not the same
FIXED = (FunctionType, BuiltinFunctionType, type, ModuleType, torch.Tensor, torch._ops.OpOverload)
_STATELESS = ("typing", "re", "logging", "abc", "torch", "functools", "operator", "warnings")
_MADE_OF_OTHERS = (tuple, list, set, frozenset, dict, OrderedDict, MethodType, partial)


class Unknown(Exception):
    """Nobody can tell whether this is the same the next time."""


def stateless(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _STATELESS


def frozen(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """Equal for two values exactly if code that reads them cannot tell them apart."""
    kind = type(value)
    if kind in PLAIN or isinstance(value, Enum):
        return (kind, value) if kind not in SIGNED else (kind, value, str(value))
    if isinstance(value, FIXED):
        if bound(value):
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
    if stateless(kind) and not isinstance(value, nn.Module):
        return "is", id(value)
    if _opaque(value):
        raise Unknown
    return kind, frozen(vars(value), seen)


class Kept:
    """A value as it was; compared quickly where nothing changed, which is nearly always."""

    __slots__ = ("attributes", "fixed", "inside", "items", "kind", "value", "version", "was")

    def __init__(self, value: Any, depth: int = 0) -> None:
        self.value, self.kind, self.was = value, type(value), None  # an object may become one of another class
        self.items: tuple | None = None  # of what holds nothing but fixed values
        self.attributes: dict[str, Kept | None] | None = None  # of an object; None for what cannot be compared
        self.version = 0  # of an object's attributes, or a dict's items, at that time
        self.inside: list[tuple[str, Kept]] = []  # attributes that may change inside
        self.fixed = type(value) in PLAIN or isinstance(value, (*FIXED, Enum))
        if self.fixed:
            if bound(value) or isinstance(value, FakeTensor):
                raise Unknown
            return
        if _opaque(value) or depth > 6:  # objects may hold each other
            raise Unknown
        made_of_others = type(value) in _MADE_OF_OTHERS
        if not made_of_others and stateless(type(value)):
            self.fixed = True
        elif not made_of_others:
            self.attributes = {name: _kept_or_none(own, depth + 1) for name, own in vars(value).items()}
            self.version = dict_version(_own(value))
            known = ((name, kept) for name, kept in self.attributes.items() if kept is not None)
            self.inside = [(name, kept) for name, kept in known if not kept.fixed]
        else:
            self.items = _fixed_items(value)
            if self.items is None:
                self.was = frozen(value)
            elif type(value) is dict:
                self.version = dict_version(value)

    def classes(self) -> Iterator[type]:
        """Those of objects: what a class holds, its objects have too."""
        if self.attributes is not None:
            yield self.kind
            for kept in self.attributes.values():
                if kept is not None:
                    yield from kept.classes()

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
            if value is self.value or type(value) is not type(self.value) or self.kind not in PLAIN:
                return value is self.value
            return value == self.value and (self.kind not in SIGNED or str(value) == str(self.value))
        if self.attributes is not None:
            if type(value) is not self.kind:
                return False
            own = _own(value)
            unchanged = value is self.value and dict_version(own) == self.version
            return (unchanged and self._same_inside(own)) or self._same_attributes(own)
        if value is self.value and self.version and dict_version(value) == self.version:
            return True
        if self.items is not None and type(value) is type(self.value):
            items = _items(value)
            if len(items) == len(self.items) and all(map(is_, items, self.items)):
                return True
            if self.was is None:
                self.was = frozen(_holding(type(value), self.items))
        try:
            return frozen(value) == self.was
        except Unknown:
            return False

    def _same_inside(self, own: dict[str, Any]) -> bool:
        """Of an object that has the very attributes that it had."""
        return all(kept.same(own[name]) for name, kept in self.inside)

    def _same_attributes(self, own: dict[str, Any]) -> bool:
        assert self.attributes is not None
        if list(own) != list(self.attributes):  # code may ask for all of them in order
            return False
        for name, kept in self.attributes.items():
            if kept is not None and not (kept.fixed and own[name] is kept.value) and not kept.same(own[name]):
                return False
        return True


def _own(value: Any) -> dict[str, Any]:
    """An object's attributes; its class may do more than look when it is asked."""
    return object.__getattribute__(value, "__dict__")


def _items(value: Any) -> tuple:
    return (*value, *value.values()) if isinstance(value, dict) else tuple(value)


def _fixed_items(value: Any) -> tuple | None:
    """All that a container holds, if that is fixed: then it is the same as long as it holds the same objects."""
    if type(value) not in (tuple, list, set, frozenset, dict, OrderedDict):
        return None
    items = _items(value)
    if not all(type(item) in PLAIN or isinstance(item, (*FIXED, Enum)) for item in items):
        return None
    if any(map(bound, items)):
        raise Unknown
    return items


def _holding(kind: type, items: tuple) -> Any:
    """A container that holds these, as `_items` has them."""
    half = len(items) // 2
    return kind(zip(items[:half], items[half:], strict=True)) if issubclass(kind, dict) else kind(items)


def _kept_or_none(value: Any, depth: int) -> Kept | None:
    try:
        return Kept(value, depth)
    except Unknown:
        return None


def _opaque(value: Any) -> bool:
    """Whether a value may have state that nobody can see."""
    kind = type(value)
    if kind in _MADE_OF_OTHERS or stateless(kind):
        return False
    if isinstance(value, nn.Module) or hasattr(value, "__next__") or not hasattr(value, "__dict__"):
        return True
    # only what classes written in Python keep in __dict__ can be seen
    return any(not base.__flags__ & _HEAP or vars(base).get("__slots__") for base in kind.__mro__[:-1])


_HEAP = 1 << 9  # of a class that was made by a class statement


def bound(value: Any) -> bool:
    """Whether a builtin function is a method of some object."""
    owner = getattr(value, "__self__", None) if isinstance(value, BuiltinFunctionType) else None
    return not (owner is None or isinstance(owner, (ModuleType, type)))
