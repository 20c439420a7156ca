"""Whether values that were compared are still what they were, without comparing them again.

A thousand layers read the same configuration and the same globals. What such a value consists of is mostly kept in
dicts, and a dict tells by its version whether it changed.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any

from torch._C._dynamo.guards import dict_version  # another one after every change; no public way to tell

from tapas.capture.repeated.kept import Kept

_attribute = object.__getattribute__  # an object's class may do more than look when it is asked


class Still:
    """Values, and how to read others, as they are now."""

    __slots__ = ("dicts", "found", "kinds", "objects", "reads", "rest", "values", "versions")

    def __init__(self, values: tuple, kept: Iterable[Kept], names: list[tuple[str, Callable[[], Any], Kept]]) -> None:
        """`values`: those that may change inside, each with what is kept of it; `names` are read again."""
        self.values = values
        objects: dict[int, Any] = {}  # a configuration is an attribute of many
        dicts: dict[int, dict] = {}
        self.rest: list[tuple[Kept, Any]] = []  # has to be compared nevertheless
        self.reads: list[Callable[[], Any]] = []
        self.found: list[Any] = []

        def look(value: Any, kept: Kept) -> None:
            if kept.fixed or (kept.items is not None and type(value) in (tuple, frozenset)):
                return
            if kept.attributes is not None:
                if id(value) not in objects:
                    objects[id(value)] = value
                    for name, inner in kept.inside:
                        look(_attribute(value, "__dict__")[name], inner)
            elif kept.items is not None and type(value) is dict:
                dicts[id(value)] = value
            else:
                self.rest.append((kept, value))

        for value, one in zip(values, kept, strict=True):
            look(value, one)
        for _, again, one in names:
            value, source = again(), _source(again)
            if source is not None:
                dicts[id(source)] = source
            else:
                self.reads.append(again)
                self.found.append(value)
            look(value, one)
        self.objects, self.dicts = list(objects.values()), list(dicts.values())
        self.kinds, self.versions = list(map(type, self.objects)), self._versions()

    def holds(self) -> bool:
        """Whether all of them are the very same, and the same inside."""
        return (
            self._versions() == self.versions
            and list(map(type, self.objects)) == self.kinds  # an object may become one of another class
            and all(map(is_, [again() for again in self.reads], self.found))
            and (not self.rest or all(kept.same(value) for kept, value in self.rest))
        )

    def _versions(self) -> list[int]:
        own = map(_attribute, self.objects, repeat("__dict__"))
        return [*map(dict_version, self.dicts), *map(dict_version, own)]


def _source(again: Callable[[], Any]) -> dict | None:
    """The dict that a value is read from by its name."""
    owner = getattr(again.func, "__self__", None) if isinstance(again, partial) else None
    return owner if type(owner) is dict else None
