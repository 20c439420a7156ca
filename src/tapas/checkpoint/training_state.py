"""Plain data as JSON, what it holds of tensors beside it; and an optimizer's state in this form, under the names of
the parameters instead of their numbers. Nothing is ever executed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from tapas.checkpoint.dcp import ReadTarget
from tapas.checkpoint.module_state import CheckpointError, Entry, listed

_NOT_OPTIONS = ("params", "param_names")


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A JSON tree; the tensors in it are put into `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        tree = [encode(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
        return tree if isinstance(value, list) else {"tuple": tree}
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise CheckpointError(name, f"has the key {wrong[0]!r}", "use texts as keys")
        return {"dict": {key: encode(v, f"{name}.{key}", tensors) for key, v in value.items()}}
    raise CheckpointError(
        name, f"is a {type(value).__name__}", "keep only numbers, texts, lists, tuples, dicts and tensors"
    )


def decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `encode`."""
    if isinstance(tree, list):
        return [decode(t, tensors) for t in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, inner),) = tree.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "tuple":
        return tuple(decode(t, tensors) for t in inner)
    return {key: decode(t, tensors) for key, t in inner.items()}


def tensor_names(tree: Any) -> Iterator[str]:
    if isinstance(tree, list):
        for t in tree:
            yield from tensor_names(t)
    elif isinstance(tree, dict):
        ((kind, inner),) = tree.items()
        if kind == "tensor":
            yield inner
        else:
            yield from tensor_names(list(inner.values()) if kind == "dict" else inner)


def empty(saved: TensorStorageMetadata) -> torch.Tensor:
    """Memory for a stored tensor, whole."""
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _names(optimizer: Optimizer, wanted: Sequence[Entry]) -> list[list[str]]:
    """The parameters of each group by name."""
    names = {id(entry.tensor): entry.name for entry in wanted}
    if any(id(p) not in names for group in optimizer.param_groups for p in group["params"]):
        raise CheckpointError(
            "optimizer", "has a parameter that the module does not have", "make it from module.parameters()"
        )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def describe(optimizer: Optimizer, wanted: Sequence[Entry], tensors: dict[str, torch.Tensor]) -> Any:
    """State and options as JSON; tensors are put into `tensors`."""
    names = _names(optimizer, wanted)
    groups, state = [], {}
    for g, (group, group_names) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        groups.append({"names": group_names, "options": encode(options, f"optimizer.group.{g}", tensors)})
        for parameter, name in zip(group["params"], group_names, strict=True):
            held = optimizer.state.get(parameter)
            if held:
                state[name] = encode(dict(held), f"optimizer.state.{name}", tensors)
    return {"groups": groups, "state": state}


@dataclass(frozen=True)
class Restored:
    """Where an optimizer's tensors are to be read to, and how to finish when they are."""

    targets: dict[str, ReadTarget]
    finish: Callable[[], None]


def restore(
    place: str,
    optimizer: Optimizer,
    wanted: Sequence[tuple[Entry, tuple[str, ...]]],
    saved: Any,
    metadata: Mapping[str, TensorStorageMetadata],
) -> Restored:
    """Checks that a saved state fits, and makes room for it; changes nothing yet."""
    stored = {entry.name: names[0] for entry, names in wanted}
    names = [[stored[name] for name in group] for group in _names(optimizer, [entry for entry, _ in wanted])]
    _check_groups(place, names, [group["names"] for group in saved["groups"]])
    targets: dict[str, ReadTarget] = {}
    state: dict[int, Any] = {}
    groups, number = [], 0
    for group, group_names, saved_group in zip(optimizer.param_groups, names, saved["groups"], strict=True):
        options = {name: empty(metadata[name]) for name in tensor_names(saved_group["options"])}
        targets |= {name: ReadTarget(name, tensor) for name, tensor in options.items()}
        numbers = range(number, number + len(group_names))
        groups.append((saved_group["options"], options, list(numbers)))
        number += len(group_names)
        for i, parameter, name in zip(numbers, group["params"], group_names, strict=True):
            tree = saved["state"].get(name)
            if tree is None:
                continue
            room = {
                tensor: _room(parameter, key, optimizer.state.get(parameter, {}).get(key), metadata[tensor])
                for key, part in tree["dict"].items()
                for tensor in tensor_names(part)
            }
            targets |= {f"{i}.{tensor}": ReadTarget(tensor, where) for tensor, where in room.items()}
            state[i] = (tree, room)

    def finish() -> None:
        optimizer.load_state_dict(
            {
                "state": {i: decode(tree, room) for i, (tree, room) in state.items()},
                "param_groups": [
                    _on_device(decode(tree, options), group) | {"params": numbers}
                    for (tree, options, numbers), group in zip(groups, optimizer.param_groups, strict=True)
                ],
            }
        )

    return Restored(targets, finish)


def _check_groups(place: str, here: list[list[str]], there: list[list[str]]) -> None:
    if len(here) != len(there):
        raise CheckpointError(
            place, f"its optimizer has {len(there)} groups, this one {len(here)}", "group the parameters as before"
        )
    for g, (mine, saved) in enumerate(zip(here, there, strict=True)):
        differing = set(mine) ^ set(saved)
        if differing:
            raise CheckpointError(
                place, f"group {g} of its optimizer differs in {listed(differing)}", "group the parameters as before"
            )


def _room(parameter: torch.Tensor, key: str, now: Any, saved: TensorStorageMetadata) -> torch.Tensor:
    """Memory for a part of the state: what is there already, or like the parameter, or whole on every rank."""
    dtype = saved.properties.dtype
    if isinstance(now, torch.Tensor) and now.shape == saved.size and now.dtype == dtype:
        return now
    if key != "step" and parameter.shape == saved.size:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if key == "step" or not saved.size:
        return empty(saved)  # torch.optim counts on the CPU, and moves it where it does not
    made = empty(saved).to(parameter.device)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        made = DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return made


def _on_device(options: dict[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """A learning rate that is a tensor stays on its device."""
    return {
        key: value.to(now[key].device) if torch.is_tensor(value) and torch.is_tensor(now.get(key)) else value
        for key, value in options.items()
    }
