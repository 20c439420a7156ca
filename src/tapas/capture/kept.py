"""Values as they were, to be compared with what they are later.

Two values are the same if code that reads them cannot tell them apart. Of what hides its state (an iterator, a
class with slots, a subclass of a builtin) nobody can tell: it is unknown.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor

PLAIN = frozenset((
    int, float, bool, str, bytes, complex, type(None), type(...), range, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format,
))  # fmt: skip
FIXED = (FunctionType, BuiltinFunctionType, type, ModuleType, torch.Tensor, torch._ops.OpOverload)
_STATELESS = ("typing", "re", "logging", "abc", "torch", "functools", "operator", "warnings")
_NAMELESS = ("__dict__", "vars", "dir", "getmembers")  # ways to read attributes without their names
_MANY = 100  # items
_MADE_OF_OTHERS = (tuple, list, set, frozenset, dict, OrderedDict, MethodType, partial)


class Unknown(Exception):
    """Nobody can tell whether this is the same the next time."""


def stateless(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _STATELESS


def frozen(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """Equal for two values exactly if code that reads them cannot tell them apart."""
    kind = type(value)
    if kind in PLAIN or isinstance(value, Enum):
        return kind, value
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

    __slots__ = ("attributes", "copies", "fixed", "items", "quick", "value", "was")

    def __init__(self, value: Any, depth: int = 0) -> None:
        self.value, self.was = value, None
        self.items: tuple | None = None  # of what holds nothing but fixed values
        self.attributes: dict[str, Kept | None] | None = None  # of an object; None for what cannot be compared
        self.copies: dict[str, Any] = {}  # of the attributes that may change inside; None if that takes more to know
        self.quick: _Quick | None = None
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
            others = {name: own for name, own in vars(value).items() if not _fixed(self.attributes[name])}
            self.copies = {name: _copied(own) for name, own in others.items()}
            self.quick = self._quick()
        else:
            self.was, self.items = frozen(value), _fixed_items(value)

    def narrow(self, names: set[str], depth: int = 0) -> None:
        """What cannot be compared of an object does not count if code never asks for it. Tables of many items, which
        take long to compare, do not count either as long as it is the same object."""
        if self.attributes is None or depth > 8:
            return
        for name, kept in self.attributes.items():
            if kept is None and name in names:
                raise Unknown
            if kept is not None:
                kept.narrow(names, depth + 1)
        large = {name for name, kept in self.attributes.items() if kept is not None and _large(kept.value)} - names
        if large and names.isdisjoint(_NAMELESS):
            self.copies = {name: copy for name, copy in self.copies.items() if name not in large}
            self.quick = self._quick()

    def _quick(self) -> "_Quick | None":
        """All attributes that count as they were; None where it takes more than that to know."""
        if self.attributes is None or any(copy is None for copy in self.copies.values()):
            return None
        fixed = {name: kept.value for name, kept in self.attributes.items() if kept is not None and kept.fixed}
        copies = tuple(self.copies.values())
        return _Quick(
            list(self.attributes), picking(list(fixed)), tuple(fixed.values()),
            picking(list(self.copies)), copies, list(map(type, copies)),
        )  # fmt: skip

    def same(self, value: Any) -> bool:
        if self.fixed:
            return value is self.value or (type(value) is type(self.value) in PLAIN and value == self.value)
        if self.attributes is not None:
            if type(value) is not type(self.value):
                return False
            own = vars(value)
            if value is self.value and self.quick is not None and self.quick.same(own):
                return True
            return self._same_attributes(own)
        if self.items is not None and type(value) is type(self.value):
            items = _items(value)
            if len(items) == len(self.items) and all(map(is_, items, self.items)):
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


class _Quick(NamedTuple):
    """Attributes of an object, ready to be compared all at once: it has the same ones, those that are fixed are the
    very same, and those that may have changed inside are equal to what they were."""

    names: list[str]
    fixed: Callable[[Any], tuple]
    objects: tuple
    others: Callable[[Any], tuple]
    copies: tuple
    types: list[type]

    def same(self, own: dict[str, Any]) -> bool:
        if list(own) != self.names or not all(map(is_, self.fixed(own), self.objects)):
            return False
        others = self.others(own)
        return others == self.copies and list(map(type, others)) == self.types


def _fixed(kept: Kept | None) -> bool:
    return kept is not None and kept.fixed


def picking(keys: Sequence[Any]) -> Callable[[Any], tuple]:
    """A function that gets the items with these keys."""
    return itemgetter(*keys) if len(keys) > 1 else lambda held: tuple([held[key] for key in keys])


def _large(value: Any) -> bool:
    return type(value) in _MADE_OF_OTHERS[:6] and len(value) > _MANY


def _items(value: Any) -> tuple:
    return (*value, *value.values()) if isinstance(value, dict) else tuple(value)


def _fixed_items(value: Any) -> tuple | None:
    """All that a container holds, if that is fixed: then it is the same as long as it holds the same objects."""
    if type(value) not in (tuple, list, set, frozenset, dict, OrderedDict):
        return None
    items = _items(value)
    return items if all(type(item) in PLAIN or isinstance(item, (*FIXED, Enum)) for item in items) else None


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


def _copied(value: Any) -> Any:
    """Equal to the value until something in it changes; None where it takes more than that to know."""
    if type(value) in PLAIN or isinstance(value, (*FIXED, Enum)):
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
