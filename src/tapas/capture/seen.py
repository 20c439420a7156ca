"""What one run of a module read, and whether another module would read the same."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tapas.capture.kept import Kept


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
