"""What a rank is given and what its program takes: the whole batch, this rank's part of it, or DTensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tapas.errors import TapasError
from tapas.runtime.cut import Cut
from tapas.runtime.placements import placement


@dataclass(frozen=True)
class Input:
    """One input of a program."""

    name: str
    shape: tuple[int, ...]  # of the whole
    cut: Cut | None  # None: the program takes it whole
    part: tuple[int, ...]  # the shape of what the program takes

    def take(self, value: torch.Tensor, device: torch.device, parts: bool) -> torch.Tensor:
        """What the program takes; `parts`: plain tensors are what it takes already."""
        if isinstance(value, DTensor):
            if self.cut is not None and list(value.placements) == [placement(s.value) for s in self.cut.layout]:
                return value.to_local()
            value = value.full_tensor()
        elif parts:
            return value.to(device)
        value = value.to(device)
        return self.cut(value) if self.cut is not None else value


def input_of(name: str, shape: tuple[int, ...], cut: Cut | None) -> Input:
    part = shape
    for conversion in cut.conversions if cut is not None else ():
        part = conversion.shape(part)
    return Input(name, shape, cut, part)


def named(names: Sequence[str], order: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All inputs by name; `order` is that of the original's positional arguments."""
    given = dict(zip(order, args, strict=False))
    if len(args) > len(order):
        raise TapasError("inputs", f"{len(args)} are given, the model takes {len(order)}", f"give {', '.join(names)}")
    if twice := sorted(given.keys() & kwargs.keys()):
        raise TapasError(", ".join(twice), "given by position and by name", "give each input once")
    given = {name: value for name, value in (given | dict(kwargs)).items() if value is not None or name in names}
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise TapasError(", ".join(unknown), "not an input that was captured", f"give {', '.join(names)}")
    missing = [name for name in names if given.get(name) is None]
    if missing:
        raise TapasError(", ".join(missing), "missing", f"the plan was made for {', '.join(names)}")
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise TapasError(name, f"is a {type(value).__name__}", "give a tensor")
        if value.requires_grad and torch.is_grad_enabled():
            raise TapasError(name, "requires a gradient", "gradients of inputs are not supported: detach it")
    return given
