"""Which submodules may be copies of each other, as far as their structure tells.

Members of one container that have the same classes, parameters and buffers all the way down. Whether they
also compute the same depends on what their code reads besides: see watch.py.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
LEAST = 4  # fewer are traced sooner than compared


@dataclass(frozen=True, slots=True)
class Structure:
    """What members that may be copies have in common."""

    number: int
    parameters: tuple[str, ...]  # paths below the member, in order
    buffers: tuple[str, ...]
    facts: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of these


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A submodule that has siblings of the same structure."""

    path: str
    container: nn.Module
    module: nn.Module
    below: list[nn.Module]  # itself and all its submodules
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    structure: Structure
    hooked: bool


def repeated(model: nn.Module) -> list[Member]:
    """Members of containers that have a sibling of the same structure, outermost first; none within another.

    Those with hooks are left out: whoever listens has to hear them all.
    """
    if hooked([model]) or _global_hooks():
        return []
    found: list[Member] = []
    seen: set[int] = set()  # a module may stand at several places
    known: dict[tuple, Structure] = {}

    def look(module: nn.Module, path: str) -> None:
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        alike: dict[int, list[Member]] = defaultdict(list)
        if isinstance(module, _CONTAINERS) and len(children) >= LEAST:
            kinds = Counter(type(child) for _, child in children)
            for name, child in children:
                if kinds[type(child)] >= LEAST and child._modules and id(child) not in seen:
                    try:
                        member = _member(f"{path}{name}", module, child, known)
                    except (KeyError, RuntimeError, NotImplementedError):  # compiled, scripted, or not initialised
                        continue
                    alike[member.structure.number].append(member)
        for same in alike.values():
            if len(same) >= LEAST:
                found.extend(member for member in same if not member.hooked)
                for member in same:
                    seen.update(map(id, member.below))
        for name, child in children:
            if id(child) not in seen:
                seen.add(id(child))
                look(child, f"{path}{name}.")

    look(model, "")
    return found


def _member(path: str, container: nn.Module, module: nn.Module, known: dict[tuple, Structure]) -> Member:
    """Structures are equal for the same classes with the same parameters and buffers, tied in the same way."""
    below: list[nn.Module] = []
    key: list[Any] = []
    parameters: list[torch.Tensor] = []
    buffers: list[torch.Tensor] = []
    first: dict[int, int] = {}
    listened = False

    def look(module: nn.Module) -> None:
        nonlocal listened
        own = vars(module)
        below.append(module)
        key.append(type(module))
        if _announced(type(module)):
            raise KeyError(type(module))
        key.append(own["training"])
        key.append(frozenset(own))  # an attribute of one may hide what others have from their class
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            listened = True
        if own["_buffers"]:
            key.append(frozenset(own["_non_persistent_buffers_set"]))
        for kind, found in (("_parameters", parameters), ("_buffers", buffers)):
            for name, tensor in own[kind].items():
                key.append(name)
                if tensor is not None:
                    found.append(tensor)
                    key.extend((first.setdefault(id(tensor), len(first)), type(tensor), *same_tensor(tensor)))
        for name, child in own["_modules"].items():
            key.append(name)
            if child is not None:
                look(child)
        key.append(None)

    look(module)
    shape = tuple(key)
    if shape not in known:
        names, others = tuple(_paths(module, "_parameters")), tuple(_paths(module, "_buffers"))
        facts = tuple((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in (*parameters, *buffers))
        known[shape] = Structure(len(known), names, others, facts)
    return Member(path, container, module, below, parameters, buffers, known[shape], listened)


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


def _global_hooks() -> bool:
    from torch.nn.modules import module

    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    return any(getattr(module, name) for name in (*names, "_global_backward_pre_hooks"))


def walk(module: nn.Module) -> list[nn.Module]:
    """The module and all below it, in an order that is the same for all of its structure."""
    found = [module]
    for child in module._modules.values():
        if child is not None:
            found += walk(child)
    return found


def hooked(modules: list[nn.Module]) -> bool:
    for module in modules:
        own = vars(module)
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return True
    return False


def same_tensor(tensor: torch.Tensor) -> tuple:
    """What code can tell of a tensor without its values."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
