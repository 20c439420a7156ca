"""What one run of a module read, and whether another module would read the same."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tapas.capture.kept import Kept

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
        compared: set[int] = set()  # a configuration is an attribute of many
        for value, kept in self._again(modules):
            if value is kept.value and (kept.fixed or id(value) in compared):
                continue
            compared.add(id(value))
            if not kept.same(value):
                return False
        return True

    def _again(self, modules: list[nn.Module]) -> Iterator[tuple[Any, Kept]]:
        """What would be read now, beside what was."""
        for number, read in self.attributes.items():
            if read:
                own = modules[number].__dict__
                for name, kept in read.items():
                    yield own.get(name, _NOTHING), kept
        for _, again, kept in self.names:
            yield again(), kept

    def changed(self, modules: list[nn.Module]) -> str:
        """What would not be the same now."""
        own = [f"{type(modules[number]).__name__}.{name}" for number, read in self.attributes.items() for name in read]
        names = (*own, *(name for name, _, _ in self.names))
        found = zip(names, self._again(modules), strict=True)
        return ", ".join(name for name, (value, kept) in found if not kept.same(value))
