"""What one run of a module read, and whether another module would read the same."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import nn

from tapas.capture.kept import PLAIN, Kept
from tapas.picking import Picking, picking

_attributes, _training = attrgetter("__dict__"), itemgetter("training")
_NOTHING = object()  # in place of an attribute that is not there: the same as no value


@dataclass
class Seen:
    """What one run of a module read, as it was then."""

    attributes: dict[int, dict[str, Kept]] = field(default_factory=dict)  # by number of the submodule
    names: list[tuple[str, Callable[[], Any], Kept]] = field(default_factory=list)  # and how to read it again
    training: list[bool] = field(default_factory=list)  # of the module and all below
    unknown: str = ""  # what cannot be compared, if something

    def same_for(self, modules: list[nn.Module]) -> bool:
        """Whether a module of the same structure, with attributes of the same names, would read the same now."""
        own = list(map(_attributes, modules))
        if self.unknown or list(map(_training, own)) != self.training:
            return False
        try:
            values = self._now(own)
        except KeyError:  # an attribute is gone
            return False
        plain = self._plain(values)
        if plain != self._values or list(map(type, plain)) != self._types:
            return False
        if not all(map(is_, self._fixed(values), self._objects)):
            return False
        compared: set[int] = set()  # a configuration is an attribute of many
        for place, kept in self._others:
            value = values[place]
            if value is kept.value and id(value) in compared:
                continue
            if not kept.same(value):
                return False
            if value is kept.value:
                compared.add(id(value))
        return True

    def _now(self, own: list[dict[str, Any]]) -> list[Any]:
        """What would be read now of the attributes of all modules, in the order of `_kept`."""
        found: list[Any] = []
        for number, pick in self._picks:
            found += pick(own[number])
        return found + [again() for _, again, _ in self.names]

    # A module is asked a thousand times, once nothing is added any more: what is asked for is made ready once.

    @cached_property
    def _picks(self) -> list[tuple[int, Picking]]:
        return [(number, picking(list(read))) for number, read in self.attributes.items() if read]

    @cached_property
    def _kept(self) -> list[Kept]:
        own = [kept for read in self.attributes.values() for kept in read.values()]
        return own + [kept for _, _, kept in self.names]

    @cached_property
    def _plain(self) -> Picking:
        """Plain values: these are compared all at once."""
        return picking([place for place, kept in enumerate(self._kept) if type(kept.value) in PLAIN])

    @cached_property
    def _values(self) -> tuple:
        return self._plain([kept.value for kept in self._kept])

    @cached_property
    def _types(self) -> list[type]:
        return list(map(type, self._values))

    @cached_property
    def _fixed(self) -> Picking:
        """Objects that are the same only if they are the very same."""
        return picking([i for i, kept in enumerate(self._kept) if kept.fixed and type(kept.value) not in PLAIN])

    @cached_property
    def _objects(self) -> tuple:
        return self._fixed([kept.value for kept in self._kept])

    @cached_property
    def _others(self) -> list[tuple[int, Kept]]:
        return [(place, kept) for place, kept in enumerate(self._kept) if not kept.fixed]

    def changed(self, modules: list[nn.Module]) -> str:
        """What would not be the same now."""
        said = [f"{type(modules[number]).__name__}.{name}" for number, read in self.attributes.items() for name in read]
        names = (*said, *(name for name, _, _ in self.names))
        own = (vars(modules[number]).get(name, _NOTHING) for number, read in self.attributes.items() for name in read)
        found = zip(names, (*own, *(again() for _, again, _ in self.names)), self._kept, strict=True)
        return ", ".join(name for name, value, kept in found if not kept.same(value))
