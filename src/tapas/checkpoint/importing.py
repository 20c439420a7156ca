"""Weights of a single device, read straight into a module: each rank reads its part only."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from tapas.checkpoint.matching import CheckpointError, Entry, check_shapes, entries, match
from tapas.checkpoint.parts import Box, boxes
from tapas.checkpoint.sources import Source, open_safetensors, open_state_dict
from tapas.checkpoint.team import team_of

Work = list[tuple[str, list[Box]]]


def load_safetensors(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a folder as `save_pretrained` writes it, or a single .safetensors file."""
    _load(module, lambda: open_safetensors(Path(path)))


def load_weights(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a state_dict that `torch.save` wrote."""
    _load(module, lambda: open_state_dict(Path(path)))


def _load(module: nn.Module, opened: Callable[[], Source]) -> None:
    team = team_of(module)
    source, work = team.agree(lambda: _check(module, opened()))
    team.agree(lambda: _read(source, work))


def _check(module: nn.Module, source: Source) -> tuple[Source, Work]:
    """What this rank is to read; nothing is changed."""
    found = match(source.place, entries(module), source.names, {})
    check_shapes(source.place, found, source.shape)
    work: Work = []
    for entry, names in found:
        mine = boxes(entry.name, entry.tensor)
        _check_tied(source, entry, names, mine)
        work.append((names[0], mine))
    return source, work


def _check_tied(source: Source, entry: Entry, names: tuple[str, ...], mine: list[Box]) -> None:
    """Older files store a tied weight under all of its names; they have to say the same."""
    for other in names[1:]:
        for box in mine:
            if not torch.equal(source.part(names[0], box.slices), source.part(other, box.slices)):
                raise CheckpointError(
                    source.place, f"{names[0]} and {other} differ", "the module has one tensor for both: untie it"
                )


def _read(source: Source, work: Work) -> None:
    with torch.no_grad():
        for name, mine in work:
            for box in mine:
                box.view.copy_(source.part(name, box.slices))
