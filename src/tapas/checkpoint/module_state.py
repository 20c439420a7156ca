"""A module's tensors by name, and how they fit what a file holds."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tapas._torch import uncompiled
from tapas.errors import TapasError

SHOWN = 8  # names in a message


class CheckpointError(TapasError):
    """Weights or checkpoints that cannot be read or written."""

    def __reduce__(self) -> Any:  # torch sends it from rank to rank
        return type(self), (self.place, self.fact, self.remedy)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a module, with all of its names: tied weights have several."""

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return self.names[0]


def entries(module: nn.Module) -> list[Entry]:
    """Parameters and persistent buffers, each once, in the module's order."""
    module = uncompiled(module)
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(name, "is not a tensor", "keep such state in `extra`")
        if value.is_meta:
            raise CheckpointError(name, "is on the meta device", "give it memory first: module.to_empty(device=...)")
        found.setdefault(id(value), ([], value))[0].append(name)
    return [Entry(tuple(names), tensor) for names, tensor in found.values()]


def listed(names: Collection[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")


def match(
    place: str, wanted: Sequence[Entry], stored: Collection[str], aliases: Mapping[str, str]
) -> list[tuple[Entry, tuple[str, ...]]]:
    """For each entry the names under which it is stored: one, or several where tied weights were stored apart."""
    found = []
    for entry in wanted:
        names = (name if name in stored else aliases.get(name, "") for name in entry.names)
        found.append((entry, tuple(dict.fromkeys(name for name in names if name in stored))))
    missing = [entry.name for entry, names in found if not names]
    unexpected = set(stored) - {name for _, names in found for name in names}
    facts = [f"has no {listed(missing)}"] if missing else []
    facts += [f"has {listed(unexpected)}, which the module does not have"] if unexpected else []
    if facts:
        raise CheckpointError(place, "; ".join(facts), "load it into the model it was made from")
    return found


def check_shapes(
    place: str, found: Sequence[tuple[Entry, tuple[str, ...]]], shape: Callable[[str], Sequence[int]]
) -> None:
    wrong = [
        f"{name} has shape {tuple(shape(name))} instead of {tuple(entry.tensor.shape)}"
        for entry, names in found
        for name in names
        if tuple(shape(name)) != tuple(entry.tensor.shape)
    ]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise CheckpointError(place, ", ".join(wrong[:SHOWN]) + more, "load it into the model it was made from")
