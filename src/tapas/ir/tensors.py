"""The tensors of a graph, and which of them are leaves.

A deep model has tens of thousands of parameters, nearly all of them in copies of a few submodules. What those hold
follows from where they are: a graph knows their families, and makes a leaf or a tensor when somebody asks for it.
"""

from abc import abstractmethod
from collections.abc import Collection, ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple, TypeVar, cast, overload

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
    unpriced: bool = False  # but not from what is trained by default: it is exact, and nobody plans for it

    @property
    def priced(self) -> bool:
        """Whether its gradient is part of the step that is planned."""
        return self.differentiable and not self.unpriced

    @property
    def constant(self) -> "Tensor":
        """As one sees it who sends no gradient back."""
        return Tensor(self.name, self.shape, self.dtype) if self.differentiable else self

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
    kind: str  # "input", "parameter" (or a buffer that is a weight), "buffer" or "constant"
    paths: tuple[str, ...] = ()  # its names in the model; several when weights are tied


class MemberTensor(NamedTuple):
    """A tensor that every submodule of a family holds."""

    kind: str  # "parameter" or "buffer"
    shape: tuple[int, ...]
    dtype: str
    differentiable: bool


@dataclass(frozen=True, eq=False)
class Family:
    """What some submodules hold, each for itself alone."""

    held: dict[str, MemberTensor]  # by path below the submodule, parameters first


Families = dict[str, Family]  # by the paths of submodules


class NamesBelow(Sequence[str]):
    """Names below a path, made when they are asked for."""

    __slots__ = ("names", "path")

    def __init__(self, path: str, names: tuple[str, ...]) -> None:
        self.path, self.names = path, names

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[str, ...]: ...
    def __getitem__(self, number: int | slice) -> str | tuple[str, ...]:
        return f"{self.path}.{self.names[number]}" if isinstance(number, int) else tuple(self)[number]

    def __iter__(self) -> Iterator[str]:
        path = self.path
        return iter([f"{path}.{name}" for name in self.names])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, NamesBelow)) and tuple(self) == tuple(cast(Sequence[str], other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def owner_of(name: str, families: Families) -> tuple[str, str] | None:
    """The submodule that holds a tensor, and the tensor's path below it."""
    dot = name.find(".") if families else -1
    while dot >= 0:
        family = families.get(name[:dot])
        if family is not None:
            below = name[dot + 1 :]
            return (name[:dot], below) if below in family.held else None
        dot = name.find(".", dot + 1)
    return None


V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class _LazyMapping(Mapping[str, V]):
    """Values by name: some that are given, and those of families, which are made when somebody asks."""

    explicit: dict[str, V]
    families: Families = field(default_factory=dict[str, Family])

    @abstractmethod
    def _make(self, name: str, member: MemberTensor) -> V: ...

    def __getitem__(self, name: str) -> V:
        if name in self.explicit:
            return self.explicit[name]
        owner = owner_of(name, self.families)
        if owner is None:
            raise KeyError(name)
        return self._make(name, self.families[owner[0]].held[owner[1]])

    def __contains__(self, name: object) -> bool:
        return name in self.explicit or (isinstance(name, str) and owner_of(name, self.families) is not None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self.explicit) + sum([len(family.held) for family in self.families.values()])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self.items()) == dict(cast(Mapping[str, V], other).items())

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def _all(self) -> dict[str, V]:
        return self.explicit | self._of_families()

    def _of_families(self) -> dict[str, V]:
        values: dict[str, V] = {}
        for path, family in self.families.items():
            for below, member in family.held.items():
                name = f"{path}.{below}"
                values[name] = self._make(name, member)
        return values

    def items(self) -> ItemsView[str, V]:
        return self._all.items()

    def values(self) -> ValuesView[V]:
        return self._all.values()


@dataclass(frozen=True, eq=False)
class Tensors(_LazyMapping[Tensor]):
    def _make(self, name: str, member: MemberTensor) -> Tensor:
        return Tensor(name, member.shape, member.dtype, member.differentiable)


@dataclass(frozen=True, eq=False)
class Leaves(_LazyMapping[Leaf]):
    """By the names of their tensors: parameters and buffers as the model has them, then the others."""

    order: Sequence[str] = ()  # tensors and submodules as the model has them

    def _make(self, name: str, member: MemberTensor) -> Leaf:
        return Leaf(name, member.kind, (name,))

    @cached_property
    def _all(self) -> dict[str, Leaf]:
        if not self.order:
            return self.explicit | self._of_families()
        others = self._of_families()
        leaves: dict[str, Leaf] = {}
        for kind in ("parameter", "buffer"):
            for place in self.order:
                family = self.families.get(place)
                if family is not None:
                    names = [f"{place}.{below}" for below, member in family.held.items() if member.kind == kind]
                    leaves.update((name, others[name]) for name in names)
                elif place in self.explicit and self.explicit[place].kind == kind:
                    leaves[place] = self.explicit[place]
        return leaves | {name: leaf for name, leaf in self.explicit.items() if name not in leaves}

    def in_model_order(self, names: Collection[str]) -> tuple[str, ...]:
        wanted = set(names)
        if len(wanted) > 1 and all(self.explicit[name].kind == "parameter" for name in names if name in self.explicit):
            ordered = tuple(filter(wanted.__contains__, self.order))
            if len(ordered) == len(wanted):
                return ordered
        return tuple(filter(wanted.__contains__, self)) if len(wanted) > 1 else tuple(names)

    @cached_property
    def distinct(self) -> tuple[tuple[Leaf, int], ...]:
        """A leaf for all that differ in their submodule only, and how many there are."""
        first: dict[int, str] = {}
        times: dict[int, int] = {}
        for path, family in self.families.items():
            first.setdefault(id(family), path)
            times[id(family)] = times.get(id(family), 0) + 1
        leaves = [(leaf, 1) for leaf in self.explicit.values()]
        for number, path in first.items():
            names = (f"{path}.{below}" for below in self.families[path].held)
            leaves += [(self[name], times[number]) for name in names]
        return tuple(leaves)
