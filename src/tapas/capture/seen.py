"""What one run of a module read, and whether another module would read the same."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any

from torch import nn

from tapas.capture.kept import PLAIN, Kept

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
        if self.unknown or self.training != [module.__dict__["training"] for module in modules]:
            return False
        values = self._now(modules)
        plain = [values[place] for place in self._plain]
        if plain != self._values or list(map(type, plain)) != self._types:
            return False
        if not all(map(is_, [values[place] for place in self._fixed], self._objects)):
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

    def _now(self, modules: list[nn.Module]) -> list[Any]:
        """What would be read now, in the order of `_kept`."""
        own = [modules[number].__dict__.get(name, _NOTHING) for number, name in self._places]
        return own + [again() for _, again, _ in self.names]

    # A module is asked a thousand times, once nothing is added any more: what is asked for is made ready once.

    @cached_property
    def _places(self) -> list[tuple[int, str]]:
        return [(number, name) for number, read in self.attributes.items() for name in read]

    @cached_property
    def _kept(self) -> list[Kept]:
        own = [kept for read in self.attributes.values() for kept in read.values()]
        return own + [kept for _, _, kept in self.names]

    @cached_property
    def _plain(self) -> list[int]:
        """Where there are plain values: these are compared all at once."""
        return [place for place, kept in enumerate(self._kept) if type(kept.value) in PLAIN]

    @cached_property
    def _values(self) -> list[Any]:
        return [self._kept[place].value for place in self._plain]

    @cached_property
    def _types(self) -> list[type]:
        return list(map(type, self._values))

    @cached_property
    def _fixed(self) -> list[int]:
        """Where there are objects that are the same only if they are the very same."""
        return [place for place, kept in enumerate(self._kept) if kept.fixed and type(kept.value) not in PLAIN]

    @cached_property
    def _objects(self) -> list[Any]:
        return [self._kept[place].value for place in self._fixed]

    @cached_property
    def _others(self) -> list[tuple[int, Kept]]:
        return [(place, kept) for place, kept in enumerate(self._kept) if not kept.fixed]

    def changed(self, modules: list[nn.Module]) -> str:
        """What would not be the same now."""
        own = [f"{type(modules[number]).__name__}.{name}" for number, read in self.attributes.items() for name in read]
        names = (*own, *(name for name, _, _ in self.names))
        found = zip(names, self._now(modules), self._kept, strict=True)
        return ", ".join(name for name, value, kept in found if not kept.same(value))
