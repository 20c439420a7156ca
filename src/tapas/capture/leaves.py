"""Parameters, buffers, constants and inputs of an exported program, tied weights as one leaf."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tapas.capture.alike import Member
from tapas.capture.calls import Value
from tapas.graph import Leaf

_KINDS = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant"}


@dataclass(frozen=True, slots=True)
class Leaves:
    bind: dict[str, Any]  # placeholder name -> Value or a plain constant
    leaves: tuple[Leaf, ...]
    trainable: frozenset[str]  # of what the program reads


@dataclass(frozen=True, slots=True)
class State:
    """All parameters and buffers of a model, by path."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    members: dict[str, list[str]]  # paths of a member's parameters and buffers, by its own
    tied: dict[str, tuple[str, ...]]  # for the paths of a tensor that has several: all of them

    def paths(self, path: str) -> tuple[str, ...]:
        """All paths of a tensor; the first one is its name."""
        return self.tied.get(path) or (path,)


def state_of(model: nn.Module, members: Sequence[Member] = ()) -> State:
    held: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = {}, {}
    inside: dict[str, list[str]] = {}
    known = {id(member.module): member for member in members}  # of these it is known what they hold

    def look(module: nn.Module, path: str) -> None:
        member = known.get(id(module))
        if member is not None:
            shape = member.structure
            parameters, buffers = [path + name for name in shape.parameters], [path + name for name in shape.buffers]
            held[0].update(zip(parameters, member.inside.parameters, strict=True))
            held[1].update(zip(buffers, member.inside.buffers, strict=True))
            inside[member.path] = parameters + buffers
            return
        own = vars(module)
        for kind, found in zip(("_parameters", "_buffers"), held, strict=True):
            found.update((path + name, tensor) for name, tensor in own[kind].items() if tensor is not None)
        for name, child in own["_modules"].items():
            if child is not None:
                look(child, f"{path}{name}.")

    look(model, "")
    return State(*held, inside, _tied(*held))


def _tied(*held: dict[str, torch.Tensor]) -> dict[str, tuple[str, ...]]:
    """For the paths of a tensor that has several: all of them."""
    storages = _storages([tensor for tensors in held for tensor in tensors.values()])
    if len(set(storages)) == len(storages):
        return {}
    times = Counter(storages)
    groups: dict[Any, list[str]] = defaultdict(list)
    named = (item for tensors in held for item in tensors.items())
    for (path, tensor), storage in zip(named, storages, strict=True):
        if times[storage] > 1:
            groups[_identity(tensor)].append(path)
    return {path: tuple(paths) for paths in groups.values() if len(paths) > 1 for path in paths}


def _storages(tensors: Sequence[torch.Tensor]) -> list[int]:
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


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for two tensors that are the same memory read the same way."""
    return _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def find_leaves(exported: ExportedProgram, state: State) -> Leaves:
    values = {n.name: n.meta.get("val") for n in exported.graph.find_nodes(op="placeholder")}
    bind: dict[str, Any] = {}
    leaves: dict[str, Leaf] = {}
    trainable: set[str] = set()
    for spec in exported.graph_signature.input_specs:
        placeholder = spec.arg.name
        if not isinstance(values.get(placeholder), torch.Tensor):
            bind[placeholder] = getattr(spec.arg, "value", None)
            continue
        kind = _KINDS.get(spec.kind, "input")
        paths = state.paths(spec.target or placeholder)
        name = placeholder if kind in ("input", "constant") else paths[0]
        if name in leaves and leaves[name].kind != kind:  # a parameter `x` and an input `x`
            name = f"{kind}.{name}"
        bind[placeholder] = Value(name)
        leaves.setdefault(name, Leaf(name, kind, paths))
        if values[placeholder].requires_grad:
            trainable.add(name)
    return Leaves(bind, tuple(leaves.values()), frozenset(trainable))


def with_hidden(leaves: Leaves, state: State) -> Leaves:
    """Also those of submodules that were left out, in the order in which a whole export has them."""
    first: dict[str, Leaf] = {}
    for kind, named in (("parameter", state.parameters), ("buffer", state.buffers)):
        rows = zip(named, repeat(kind), zip(named, strict=True), strict=False)
        first.update(zip(named, map(_leaf, rows), strict=True))
    for path, paths in state.tied.items():
        if path == paths[0]:
            first[path] = first[path]._replace(paths=paths)
        else:
            del first[path]
    clashes = {leaf.tensor for leaf in leaves.leaves if leaf.tensor.startswith(("parameter.", "buffer."))}
    if clashes:  # with names of inputs
        renamed = {f"{leaf.kind}.{name}": leaf for name, leaf in first.items()}
        first = {
            name if name in clashes else leaf.tensor: leaf._replace(tensor=name) if name in clashes else leaf
            for name, leaf in renamed.items()
        }
    others = tuple(leaf for leaf in leaves.leaves if leaf.tensor not in first)
    return Leaves(leaves.bind, (*first.values(), *others), leaves.trainable)


_leaf = partial(tuple.__new__, Leaf)  # of a tuple; a deep model has a great many
