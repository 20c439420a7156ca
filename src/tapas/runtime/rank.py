"""Where a program runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tapas.runtime.collectives import Axis, Count


@dataclass(frozen=True)
class Rank:
    mesh: tuple[int, ...]
    coord: tuple[int, ...]
    wires: Sequence[Axis]
    count: Count
    device: torch.device
