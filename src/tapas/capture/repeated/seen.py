"""What one run of a module read, and whether another module would read the same."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import nn

from tapas.capture.repeated.kept import PLAIN, SIGNED, Kept
from tapas.capture.repeated.still import Still
from tapas.util import Picking, picking

_attributes, _training = attrgetter("__dict__"), itemgetter("training")
_NOTHING = object()  # in place of an attribute that is not there: the same as no value


@dataclass
class Seen:
    """What one run of a module read, as it was then."""

    attributes: dict[int, dict[str, Kept]] = field(default_factory=dict)  # by number of the submodule
    names: list[tuple[str, Callable[[], Any], Kept]] = field(default_factory=list)  # and how to read it again
    training: list[bool] = field(default_factory=list)  # of the module and all below
    unknown: str = ""  # what cannot be compared, if something
    last: Still | None = None  # what was compared and found the same, of what no module has for itself

    def same_for(self, modules: list[nn.Module]) -> bool:
        """Whether a module of the same structure, with attributes of the same names, would read the same now."""
        own = list(map(_attributes, modules))
        if self.unknown or list(map(_training, own)) != self.training:
            return False
        values: list[Any] = []
        try:
            for number, pick in self._picks:
                values += pick(own[number])
        except KeyError:  # an attribute is gone
            return False
        plain = self._plain(values)
        if plain != self._values or list(map(type, plain)) != self._types:
            return False
        if self._signs and list(map(str, self._zeros(values))) != self._signs:
            return False
        pairs = self._tuples(values)
        if pairs != self._were or list(map(type, chain(pairs, *pairs))) != self._inner:
            return False
        if not all(map(is_, self._fixed(values), self._objects)):
            return False
        return self._same_others(self._others(values))

    def _same_others(self, values: tuple) -> bool:
        """Of values that may change inside, and of all that has a name."""
        last = self.last
        if last is not None and last.holds():
            if all(map(is_, values, last.values)):
                return True
            found = zip(values, last.values, self._changing, strict=True)
            return all(value is known or kept.same(value) for value, known, kept in found)
        compared: set[int] = set()  # a configuration is an attribute of many
        read = [again() for _, again, _ in self.names]
        kept_names = [kept for _, _, kept in self.names]
        for value, kept in zip((*values, *read), (*self._changing, *kept_names), strict=True):
            if value is kept.value and id(value) in compared:
                continue
            if not kept.same(value):
                return False
            if value is kept.value:
                compared.add(id(value))
        self.last = Still(values, self._changing, self.names)
        return True

    # A module is asked a thousand times, once nothing is added any more: what is asked for is made ready once.

    @cached_property
    def _picks(self) -> list[tuple[int, Picking]]:
        return [(number, picking(list(read))) for number, read in self.attributes.items() if read]

    @cached_property
    def _kept(self) -> list[Kept]:
        return [kept for read in self.attributes.values() for kept in read.values()]

    def _places(self, wanted: Callable[[Kept], bool]) -> Picking:
        return picking([place for place, kept in enumerate(self._kept) if wanted(kept)])

    @cached_property
    def _was(self) -> list[Any]:
        return [kept.value for kept in self._kept]

    @cached_property
    def _plain(self) -> Picking:
        """Plain values: these are compared all at once."""
        return self._places(_is_plain)

    @cached_property
    def _values(self) -> tuple:
        return self._plain(self._was)

    @cached_property
    def _types(self) -> list[type]:
        return list(map(type, self._values))

    @cached_property
    def _zeros(self) -> Picking:
        """Of these, those that have a sign which equality does not see."""
        return self._places(lambda kept: kept.kind in SIGNED and kept.value == 0)

    @cached_property
    def _signs(self) -> list[str]:
        return list(map(str, self._zeros(self._was)))

    @cached_property
    def _tuples(self) -> Picking:
        """Tuples of plain values: these too, as a norm has its shape."""
        return self._places(_is_tuple)

    @cached_property
    def _were(self) -> tuple:
        return self._tuples(self._was)

    @cached_property
    def _inner(self) -> list[type]:
        return list(map(type, chain(self._were, *self._were)))

    @cached_property
    def _fixed(self) -> Picking:
        """Objects that are the same only if they are the very same."""
        return self._places(lambda kept: kept.fixed and not _is_plain(kept))

    @cached_property
    def _objects(self) -> tuple:
        return self._fixed(self._was)

    @cached_property
    def _others(self) -> Picking:
        return self._places(_may_change)

    @cached_property
    def _changing(self) -> list[Kept]:
        return list(filter(_may_change, self._kept))

    def changed(self, modules: list[nn.Module]) -> str:
        """What would not be the same now."""
        said = [f"{type(modules[number]).__name__}.{name}" for number, read in self.attributes.items() for name in read]
        names = (*said, *(name for name, _, _ in self.names))
        own = (vars(modules[number]).get(name, _NOTHING) for number, read in self.attributes.items() for name in read)
        kept = (*self._kept, *(kept for _, _, kept in self.names))
        found = zip(names, (*own, *(again() for _, again, _ in self.names)), kept, strict=True)
        return ", ".join(name for name, value, kept in found if not kept.same(value))


def _is_plain(kept: Kept) -> bool:
    return type(kept.value) in PLAIN


def _is_tuple(kept: Kept) -> bool:
    return type(kept.value) is tuple and all(type(item) in PLAIN - SIGNED for item in kept.value)


def _may_change(kept: Kept) -> bool:
    return not kept.fixed and not _is_tuple(kept)
