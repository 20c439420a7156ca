"""Parameters, buffers, constants and inputs of an exported program, tied weights as one leaf."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tapas.capture.calls import Value
from tapas.graph import Leaf

_KINDS = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant"}


@dataclass(frozen=True, slots=True)
class Leaves:
    bind: dict[str, Any]  # placeholder name -> Value or a plain constant
    leaves: tuple[Leaf, ...]
    trainable: frozenset[str]


def tied_paths(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For every path of a parameter or buffer, all the paths of that tensor."""
    groups: dict[Any, list[str]] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for path, tensor in named:
        groups.setdefault(_identity(tensor), []).append(path)
    return {path: tuple(paths) for paths in groups.values() for path in paths}


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for two tensors that are the same memory read the same way; meta tensors have storages too."""
    try:
        storage = tensor.untyped_storage()._cdata  # the only identity of a storage without data
    except (NotImplementedError, RuntimeError):
        return id(tensor)
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def find_leaves(exported: ExportedProgram, model: nn.Module) -> Leaves:
    tied = tied_paths(model)
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
        paths = tied.get(spec.target or "", (spec.target or placeholder,))
        name = placeholder if kind in ("input", "constant") else paths[0]
        if name in leaves and leaves[name].kind != kind:  # a parameter `x` and an input `x`
            name = f"{kind}.{name}"
        bind[placeholder] = Value(name)
        leaves.setdefault(name, Leaf(name, kind, paths))
        if values[placeholder].requires_grad:
            trainable.add(name)
    return Leaves(bind, tuple(leaves.values()), frozenset(trainable))
