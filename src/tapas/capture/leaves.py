"""Parameters, buffers, constants and inputs of an exported program, tied weights as one leaf."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tapas._torch import storages
from tapas.capture.calls import Value
from tapas.capture.repeated.candidates import Candidate
from tapas.errors import CaptureError
from tapas.ir.graph import Leaf

_HELD = ("_parameters", "_buffers")
_KINDS = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant"}


@dataclass(frozen=True, slots=True)
class LiftedInputs:
    """What an export takes besides its code."""

    bind: dict[str, Any]  # placeholder name -> Value or a plain constant
    leaves: tuple[Leaf, ...]
    trainable: frozenset[str]  # of what the program reads


@dataclass(frozen=True)
class ModelState:
    """The parameters and buffers of a model, by path; those of members that hold theirs alone are not written out."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    order: tuple[str, ...]  # paths of tensors and of members, as the model has them
    members: dict[str, Candidate]  # that hold theirs alone, by path
    tied: dict[str, tuple[str, ...]]  # for the paths of a tensor that has several: all of them

    def paths(self, path: str) -> tuple[str, ...]:
        """All paths of a tensor; the first one is its name."""
        return self.tied.get(path) or (path,)


def check_plain(model: nn.Module) -> None:
    """What a tensor subclass holds (as libraries for quantisation have them) is no tensor of the model."""
    for module_path, module in model.named_modules():
        for kind in _HELD:
            for name, tensor in vars(module)[kind].items():
                if hasattr(type(tensor), "__tensor_flatten__"):
                    fact = f"is a {type(tensor).__name__}, a tensor that is made of others"
                    remedy = (
                        "make plain parameters or buffers of it first (torchao.utils.unwrap_tensor_subclass does so)"
                    )
                    raise CaptureError(f"{module_path}.{name}".lstrip("."), fact, remedy)


def state_of(model: nn.Module, members: Sequence[Candidate] = (), called: Iterable[str] = ()) -> ModelState:
    """`called`: the paths of members, as often as they were called. One that was called twice does not hold what it
    holds alone: several calls read it."""
    known = {id(member.module): member for member in members}
    places: dict[str, Candidate | tuple[int, torch.Tensor]] = {}

    def look(module: nn.Module, path: str) -> None:
        member = known.get(id(module))
        if member is not None and path == f"{member.path}.":  # or it stands at another place besides
            places[member.path] = member
            return
        own = vars(module)
        for number, kind in enumerate(_HELD):
            places.update((path + name, (number, tensor)) for name, tensor in own[kind].items() if tensor is not None)
        for name, child in own["_modules"].items():
            if child is not None:
                look(child, f"{path}{name}.")

    look(model, "")
    shared = _sharing(places) | {path for path, times in Counter(called).items() if times > 1}
    held: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = {}, {}
    alone: dict[str, Candidate] = {}
    order: list[str] = []
    for place, found in places.items():
        if not isinstance(found, Candidate):
            order.append(place)
            held[found[0]][place] = found[1]
        elif place not in shared:
            order.append(place)
            alone[place] = found
        else:
            for number, names in enumerate((found.structure.parameters, found.structure.buffers)):
                paths = [f"{place}.{name}" for name in names]
                order += paths
                held[number].update(zip(paths, (found.inside.parameters, found.inside.buffers)[number], strict=True))
    return ModelState(*held, tuple(order), alone, _tied(*held))


def _sharing(places: dict[str, Candidate | tuple[int, torch.Tensor]]) -> set[str]:
    """Members that hold a tensor, or memory, that is also held elsewhere."""
    members = {path: found for path, found in places.items() if isinstance(found, Candidate)}
    others = storages([found[1] for found in places.values() if not isinstance(found, Candidate)])
    inside = [member.inside.storages for member in members.values()]
    everything = [*chain(others, *inside)]
    if len(set(everything)) == len(everything):
        return set()
    times = Counter(everything)
    return {path for path, own in zip(members, inside, strict=True) if any(times[storage] > 1 for storage in own)}


def _tied(*held: dict[str, torch.Tensor]) -> dict[str, tuple[str, ...]]:
    """For the paths of a tensor that has several: all of them. A parameter is not tied to a buffer, be it the same
    memory: one is trained, the other is not."""
    found: dict[str, tuple[str, ...]] = {}
    for tensors in held:
        where = storages(list(tensors.values()))
        if len(set(where)) < len(where):
            groups: dict[Any, list[str]] = defaultdict(list)
            for path, tensor in tensors.items():
                groups[_identity(tensor)].append(path)
            found |= {path: tuple(paths) for paths in groups.values() if len(paths) > 1 for path in paths}
    return found


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for two tensors that are the same memory read the same way."""
    return storages([tensor])[0], tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def find_leaves(exported: ExportedProgram, state: ModelState) -> LiftedInputs:
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
    return LiftedInputs(bind, tuple(leaves.values()), frozenset(trainable))


def with_hidden(leaves: LiftedInputs, state: ModelState) -> LiftedInputs:
    """Also those of submodules that were left out, but do not hold theirs alone."""
    known = {leaf.tensor: leaf for leaf in leaves.leaves}
    for kind, named in (("parameter", state.parameters), ("buffer", state.buffers)):
        for path in named:
            paths = state.paths(path)
            if path == paths[0] and path not in known:
                known[path] = Leaf(path, kind, paths)
    return LiftedInputs(leaves.bind, tuple(known.values()), leaves.trainable)
