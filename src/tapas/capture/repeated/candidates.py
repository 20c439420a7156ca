"""Which submodules may be copies of each other, as far as their structure tells.

Members of one container that have the same classes, attributes, parameters and buffers all the way down. Whether they
also compute the same is told by what they run: see evidence.py. A deep model asks a thousand times whether a submodule
has the structure of the one before: that is one pass over its modules, and one question for all of its tensors.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from tapas._torch import globally_hooked, held_modules, hooked, storages

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
LEAST = 4  # fewer are traced sooner than compared


class ModuleContents(NamedTuple):
    """What a submodule is made of, in an order that is the same for all of its structure."""

    modules: list[nn.Module]  # itself and all below it
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    hooked: bool  # somebody listens
    storages: list[int]  # of parameters, then buffers


def insides(module: nn.Module) -> tuple[ModuleContents, list[Any]]:
    """Also the names of all that is there: class, mode, attributes and what is held, of each module."""
    modules: list[nn.Module] = []
    parameters: list[Any] = []  # or None in place of one
    buffers: list[Any] = []
    names: list[Any] = []
    listened = _look(module, modules, parameters, buffers, names)
    absent = list(map(is_, parameters + buffers, repeat(None)))
    names += absent
    own, more = (_there(parameters), _there(buffers)) if True in absent else (parameters, buffers)
    return ModuleContents(modules, own, more, listened, storages(own + more)), names  # asked for while they are at hand


def _look(module: nn.Module, modules: list, parameters: list, buffers: list, names: list) -> bool:
    """Write down what is there, and return whether somebody listens."""
    own = module.__dict__
    modules.append(module)
    names.append(type(module))
    names.append(own["training"])
    names += own  # an attribute of one may hide what others have from their class
    held = own["_parameters"]
    if held:
        names.append("_parameters")
        names += held
        parameters += held.values()
    held = own["_buffers"]
    if held:
        names.append(frozenset(own["_non_persistent_buffers_set"]))
        names += held
        buffers += held.values()
    listened = hooked(module)
    children = own["_modules"]
    if children:
        names.append(len(children))
        names += children
        for child in children.values():
            if child is None:
                names.append(None)
            elif _look(child, modules, parameters, buffers, names):
                listened = True
    return listened


def _there(tensors: list[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """What submodules that may be copies of each other have in common."""

    number: int
    parameters: tuple[str, ...]  # paths below the submodule, in order
    buffers: tuple[str, ...]


class StructureTable:
    """Those that were met. Equal for the same classes with the same parameters and buffers, tied in the same way."""

    def __init__(self) -> None:
        self._known: dict[tuple, Structure] = {}

    def of(self, module: nn.Module) -> tuple[Structure, ModuleContents]:
        found, names = insides(module)
        tensors = (*found.parameters, *found.buffers)
        first: dict[int, int] = {}
        ties = tuple([first.setdefault(id(tensor), len(first)) for tensor in tensors])
        key = tuple(names), ties, tuple([(type(tensor), *same_tensor(tensor)) for tensor in tensors])
        if key not in self._known:
            if any(map(_announced, map(type, found.modules))):
                raise KeyError(type(module))
            parameters, buffers = (tuple(_paths(module, kind)) for kind in ("_parameters", "_buffers"))
            self._known[key] = Structure(len(self._known), parameters, buffers)
        return self._known[key], found


@cache
def _announced(kind: type) -> bool:
    """Whether a class is told of its subclasses: then it must not get any from us."""
    return any("__init_subclass__" in vars(base) for base in kind.__mro__[:-1])


def _paths(module: nn.Module, kind: str, path: str = "") -> Iterator[str]:
    """Where tensors of a kind are, in the order in which they are met."""
    yield from (path + name for name, tensor in vars(module)[kind].items() if tensor is not None)
    for name, child in held_modules(module).items():
        if child is not None:
            yield from _paths(child, kind, f"{path}{name}.")


def same_tensor(tensor: torch.Tensor) -> tuple:
    """What code can tell of a tensor without its values."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


class Candidate(NamedTuple):
    """A submodule that has siblings of the same structure."""

    path: str
    container: nn.Module
    module: nn.Module
    inside: ModuleContents
    structure: Structure


def repeated_modules(model: nn.Module) -> list[Candidate]:
    """Members of containers that have a sibling of the same structure, outermost first; none within another.

    Those with hooks are left out: whoever listens has to hear them all.
    """
    if hooked(model) or globally_hooked():
        return []
    found: list[Candidate] = []
    seen: set[int] = set()  # a module may stand at several places
    within: list[Candidate] = []  # whose insides are not yet among these: mostly nobody asks
    known = StructureTable()

    def look(module: nn.Module, path: str) -> None:
        children = [(name, child) for name, child in held_modules(module).items() if child is not None]
        alike: dict[int, list[Candidate]] = defaultdict(list)
        if isinstance(module, _CONTAINERS) and len(children) >= LEAST:
            while within:
                seen.update(map(id, within.pop().inside.modules))
            kinds = Counter(type(child) for _, child in children)
            here = {id(child): name for name, child in reversed(children)}  # the first place of each
            for name, child in children:
                able = kinds[type(child)] >= LEAST and held_modules(child) and here[id(child)] == name
                if able and id(child) not in seen:
                    try:
                        structure, inside = known.of(child)
                    except (KeyError, RuntimeError, NotImplementedError):  # compiled, scripted, or not initialised
                        continue
                    alike[structure.number].append(Candidate(f"{path}{name}", module, child, inside, structure))
        for same in alike.values():
            if len(same) >= LEAST:
                found.extend(member for member in same if not member.inside.hooked)
                within.extend(same)
                seen.update([id(member.module) for member in same])
        for name, child in children:
            if id(child) not in seen:
                seen.add(id(child))
                look(child, f"{path}{name}.")

    look(model, "")
    return found
