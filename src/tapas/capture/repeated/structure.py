"""The structure of a submodule: classes, attributes, parameters and buffers, all the way down.

A deep model asks a thousand times whether a submodule has the structure of the one before. So that is one pass
over its modules, and one question for all of its tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards  # no public way to compare many tensors at once

_EXACTLY = (torch.Tensor, nn.Parameter)  # a subclass may tell other shapes than it has


class Insides(NamedTuple):
    """What a submodule is made of, in an order that is the same for all of its structure."""

    modules: list[nn.Module]  # itself and all below it
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    hooked: bool  # somebody listens
    storages: list[int]  # of parameters, then buffers


def insides(module: nn.Module) -> tuple[Insides, list[Any]]:
    """Also the names of all that is there: class, mode, attributes and what is held, of each module."""
    modules: list[nn.Module] = []
    parameters: list[Any] = []  # or None in place of one
    buffers: list[Any] = []
    names: list[Any] = []
    hooked = _look(module, modules, parameters, buffers, names)
    absent = list(map(is_, parameters + buffers, repeat(None)))
    names += absent
    own, more = (_there(parameters), _there(buffers)) if True in absent else (parameters, buffers)
    return Insides(modules, own, more, hooked, storages(own + more)), names  # asked for while they are at hand


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
    hooked = bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    )
    children = own["_modules"]
    if children:
        names.append(len(children))
        names += children
        for child in children.values():
            if child is None:
                names.append(None)
            elif _look(child, modules, parameters, buffers, names):
                hooked = True
    return hooked


def _there(tensors: list[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """What submodules that may be copies of each other have in common."""

    number: int
    names: list[Any]
    parameters: tuple[str, ...]  # paths below the submodule, in order
    buffers: tuple[str, ...]
    guards: Any  # compares tensors with these; None where that takes more

    def fits(self, found: Insides, names: list[Any]) -> bool:
        """Whether a submodule is known to have this structure; if not, it may still have it."""
        return self.guards is not None and names == self.names and self.guards.check(*found.parameters, *found.buffers)


class Structures:
    """Those that were met. Equal for the same classes with the same parameters and buffers, tied in the same way."""

    def __init__(self) -> None:
        self._known: dict[tuple, Structure] = {}
        self._last: dict[type, Structure] = {}

    def of(self, module: nn.Module) -> tuple[Structure, Insides]:
        found, names = insides(module)
        last = self._last.get(type(module))
        if last is None or not last.fits(found, names):
            last = self._last[type(module)] = self._compared(module, found, names)
        return last, found

    def _compared(self, module: nn.Module, found: Insides, names: list[Any]) -> Structure:
        if any(map(_announced, map(type, found.modules))):
            raise KeyError(type(module))
        tensors = (*found.parameters, *found.buffers)
        first: dict[int, int] = {}
        ties = tuple(first.setdefault(id(tensor), len(first)) for tensor in tensors)
        key = tuple(names), ties, tuple((type(tensor), *same_tensor(tensor)) for tensor in tensors)
        if key not in self._known:
            parameters, buffers = (tuple(_paths(module, kind)) for kind in ("_parameters", "_buffers"))
            plain = len(first) == len(tensors) and all(type(tensor) in _EXACTLY for tensor in tensors)
            guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None) if plain else None
            self._known[key] = Structure(len(self._known), names, parameters, buffers, guards)
        return self._known[key]


@cache
def _announced(kind: type) -> bool:
    """Whether a class is told of its subclasses: then it must not get any from us."""
    return any("__init_subclass__" in vars(base) for base in kind.__mro__[:-1])


def _paths(module: nn.Module, kind: str, path: str = "") -> Iterator[str]:
    """Where tensors of a kind are, in the order in which they are met."""
    yield from (path + name for name, tensor in vars(module)[kind].items() if tensor is not None)
    for name, child in module._modules.items():
        if child is not None:
            yield from _paths(child, kind, f"{path}{name}.")


def walk(module: nn.Module) -> list[nn.Module]:
    """The module and all below it, in the order of its insides."""
    found = [module]
    for child in module._modules.values():
        if child is not None:
            found += walk(child)
    return found


def same_tensor(tensor: torch.Tensor) -> tuple:
    """What code can tell of a tensor without its values."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def storages(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Equal for tensors that may share memory."""
    try:
        return [tensor.untyped_storage()._cdata for tensor in tensors]
    except (NotImplementedError, RuntimeError):  # of some, which then have to be asked one by one
        return list(map(_storage, tensors))


def _storage(tensor: torch.Tensor) -> int:
    """The only identity of a storage without data: meta tensors have one too."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)
