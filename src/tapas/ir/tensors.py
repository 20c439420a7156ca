"""The tensors of a graph, and which of them are leaves.

A deep model has tens of thousands of parameters, nearly all of them in copies of a few submodules. What those hold
follows from where they are: a graph knows their families, and makes a leaf or a tensor when somebody asks for it.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple, TypeVar

ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "complex32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch."
    differentiable: bool = False  # a gradient flows through it in this graph

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        grad = "*" if self.differentiable else ""
        return f"{self.name}{grad}: {self.dtype}[{', '.join(map(str, self.shape))}]"


class Leaf(NamedTuple):
    """A tensor that no operator makes."""

    tensor: str
    kind: str  # "input", "parameter", "buffer" or "constant"
    paths: tuple[str, ...] = ()  # its names in the model; several when weights are tied


class Like(NamedTuple):
    """A tensor that every submodule of a family holds."""

    kind: str  # "parameter" or "buffer"
    shape: tuple[int, ...]
    dtype: str
    differentiable: bool


@dataclass(frozen=True, eq=False)
class Family:
    """What some submodules hold, each for itself alone."""

    held: dict[str, Like]  # by path below the submodule, parameters first


Homes = dict[str, Family]  # by the paths of submodules


class Below(Sequence[str]):
    """Names below a path, made when they are asked for."""

    __slots__ = ("names", "path")

    def __init__(self, path: str, names: tuple[str, ...]) -> None:
        self.path, self.names = path, names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number):  # type: ignore[no-untyped-def]
        return f"{self.path}.{self.names[number]}" if isinstance(number, int) else tuple(self)[number]

    def __iter__(self) -> Iterator[str]:
        path = self.path
        return iter([f"{path}.{name}" for name in self.names])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, Below)) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def home_of(name: str, homes: Homes) -> tuple[str, str] | None:
    """The submodule that holds a tensor, and the tensor's path below it."""
    dot = name.find(".") if homes else -1
    while dot >= 0:
        family = homes.get(name[:dot])
        if family is not None:
            below = name[dot + 1 :]
            return (name[:dot], below) if below in family.held else None
        dot = name.find(".", dot + 1)
    return None


V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class _Some(Mapping[str, V]):
    """Things by name: some that are known, and those of families."""

    known: dict[str, V]
    homes: Homes = field(default_factory=dict)

    @abstractmethod
    def _made(self, name: str, like: Like) -> V: ...

    def __getitem__(self, name: str) -> V:
        if name in self.known:
            return self.known[name]
        home = home_of(name, self.homes)
        if home is None:
            raise KeyError(name)
        return self._made(name, self.homes[home[0]].held[home[1]])

    def __contains__(self, name: object) -> bool:
        return name in self.known or (isinstance(name, str) and home_of(name, self.homes) is not None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self.known) + sum([len(family.held) for family in self.homes.values()])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self.items()) == dict(other.items())

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def _all(self) -> dict[str, V]:
        return self.known | self._of_homes()

    def _of_homes(self) -> dict[str, V]:
        found: dict[str, V] = {}
        for path, family in self.homes.items():
            for below, like in family.held.items():
                name = f"{path}.{below}"
                found[name] = self._made(name, like)
        return found

    def items(self):  # type: ignore[no-untyped-def]
        return self._all.items()

    def values(self):  # type: ignore[no-untyped-def]
        return self._all.values()


@dataclass(frozen=True, eq=False)
class Tensors(_Some[Tensor]):
    def _made(self, name: str, like: Like) -> Tensor:
        return Tensor(name, like.shape, like.dtype, like.differentiable)


@dataclass(frozen=True, eq=False)
class Leaves(_Some[Leaf]):
    """By the names of their tensors: parameters and buffers as the model has them, then the others."""

    order: Sequence[str] = ()  # tensors and submodules as the model has them

    def _made(self, name: str, like: Like) -> Leaf:
        return Leaf(name, like.kind, (name,))

    @cached_property
    def _all(self) -> dict[str, Leaf]:
        if not self.order:
            return self.known | self._of_homes()
        others = self._of_homes()
        found: dict[str, Leaf] = {}
        for kind in ("parameter", "buffer"):
            for place in self.order:
                family = self.homes.get(place)
                if family is not None:
                    names = [f"{place}.{below}" for below, like in family.held.items() if like.kind == kind]
                    found.update((name, others[name]) for name in names)
                elif place in self.known and self.known[place].kind == kind:
                    found[place] = self.known[place]
        return found | {name: leaf for name, leaf in self.known.items() if name not in found}

    def arranged(self, names: Collection[str]) -> tuple[str, ...]:
        """Some of them, as the model has them."""
        wanted = set(names)
        if len(wanted) > 1 and all(self.known[name].kind == "parameter" for name in names if name in self.known):
            found = tuple(filter(wanted.__contains__, self.order))
            if len(found) == len(wanted):
                return found
        return tuple(filter(wanted.__contains__, self)) if len(wanted) > 1 else tuple(names)

    @cached_property
    def alike(self) -> tuple[tuple[Leaf, int], ...]:
        """A leaf for all that differ in their submodule only, and how many there are."""
        first: dict[int, str] = {}
        times: dict[int, int] = {}
        for path, family in self.homes.items():
            first.setdefault(id(family), path)
            times[id(family)] = times.get(id(family), 0) + 1
        found = [(leaf, 1) for leaf in self.known.values()]
        for number, path in first.items():
            names = (f"{path}.{below}" for below in self.homes[path].held)
            found += [(self[name], times[number]) for name in names]
        return tuple(found)
