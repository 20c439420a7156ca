"""The structure of a submodule: classes, attributes, parameters and buffers, all the way down.

A deep model asks a thousand times whether a submodule has the structure of the one before. So that is one pass
over its modules, and one question for all of its tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
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
    names: list[Any]  # class, mode, attributes and what is held, of each module
    hooked: bool  # somebody listens


def insides(module: nn.Module) -> Insides:
    modules: list[nn.Module] = []
    parameters: list[torch.Tensor | None] = []
    buffers: list[torch.Tensor | None] = []
    names: list[Any] = []
    listened = False

    def look(module: nn.Module) -> None:
        nonlocal listened
        own = module.__dict__
        modules.append(module)
        names.append(type(module))
        names.append(own["training"])
        names.extend(own)  # an attribute of one may hide what others have from their class
        for kind, found in (("_parameters", parameters), ("_buffers", buffers)):
            held = own[kind]
            if held:
                names.append(kind)
                names.extend(held)
                found.extend(held.values())
        if own["_buffers"]:
            names.append(frozenset(own["_non_persistent_buffers_set"]))
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            listened = True
        children = own["_modules"]
        names.append(len(children))
        for name, child in children.items():
            names.append(name)
            look(child) if child is not None else names.append(None)

    look(module)
    names += [tensor is None for tensor in (*parameters, *buffers)]
    return Insides(modules, _there(parameters), _there(buffers), names, listened)


def _there(tensors: list[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """What submodules that may be copies of each other have in common."""

    number: int
    names: list[Any]
    parameters: tuple[str, ...]  # paths below the submodule, in order
    buffers: tuple[str, ...]
    facts: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of these
    guards: Any  # compares tensors with these; None where that takes more

    def fits(self, found: Insides) -> bool:
        """Whether a submodule is known to have this structure; if not, it may still have it."""
        return (
            self.guards is not None
            and found.names == self.names
            and self.guards.check(*found.parameters, *found.buffers)
        )


class Structures:
    """Those that were met. Equal for the same classes with the same parameters and buffers, tied in the same way."""

    def __init__(self) -> None:
        self._known: dict[tuple, Structure] = {}
        self._last: dict[type, Structure] = {}

    def of(self, module: nn.Module, found: Insides) -> Structure:
        last = self._last.get(type(module))
        if last is None or not last.fits(found):
            last = self._last[type(module)] = self._compared(module, found)
        return last

    def _compared(self, module: nn.Module, found: Insides) -> Structure:
        if any(map(_announced, map(type, found.modules))):
            raise KeyError(type(module))
        tensors = (*found.parameters, *found.buffers)
        first: dict[int, int] = {}
        ties = tuple(first.setdefault(id(tensor), len(first)) for tensor in tensors)
        key = tuple(found.names), ties, tuple((type(tensor), *same_tensor(tensor)) for tensor in tensors)
        if key not in self._known:
            facts = tuple((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors)
            parameters, buffers = (tuple(_paths(module, kind)) for kind in ("_parameters", "_buffers"))
            plain = len(first) == len(tensors) and all(type(tensor) in _EXACTLY for tensor in tensors)
            guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None) if plain else None
            self._known[key] = Structure(len(self._known), found.names, parameters, buffers, facts, guards)
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
