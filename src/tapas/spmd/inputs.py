"""What a rank is given and what its program takes: the whole batch, this rank's part of it, or DTensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tapas.errors import TapasError
from tapas.spmd.placements import placement
from tapas.spmd.program import Cut


@dataclass(frozen=True)
class Input:
    """One input of a program."""

    name: str
    shape: tuple[int, ...]  # of the whole
    cut: Cut | None  # None: the program takes it whole
    part: tuple[int, ...]  # the shape of what the program takes

    def fits(self, shape: Sequence[int]) -> bool:
        return tuple(shape) in (self.shape, self.part)

    def take(self, value: Any, device: torch.device) -> torch.Tensor:
        """What the program takes of a value that fits."""
        if isinstance(value, DTensor):
            if self.cut is not None and list(value.placements) == [placement(s.value) for s in self.cut.layout]:
                return value.to_local()
            value = value.full_tensor()
        value = value.to(device)
        if tuple(value.shape) == self.shape and self.cut is not None:
            return self.cut(value)
        return value


def input_of(name: str, shape: tuple[int, ...], cut: Cut | None) -> Input:
    part = shape
    for conversion in cut.conversions if cut is not None else ():
        part = conversion.shape(part)
    return Input(name, shape, cut, part)


def named(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All inputs by name."""
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    unknown = sorted(set(given) - set(names))
    if unknown or len(args) > len(names):
        place = ", ".join(unknown) or "inputs"
        raise TapasError(place, "not an input that was captured", f"give {', '.join(names)}")
    missing = [name for name in names if name not in given]
    if missing:
        raise TapasError(", ".join(missing), "missing", f"the plan was made for {', '.join(names)}")
    return given
