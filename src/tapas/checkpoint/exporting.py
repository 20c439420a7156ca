"""A module's weights as transformers stores them."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import nn

from tapas.checkpoint import folders
from tapas.checkpoint.gathering import whole
from tapas.checkpoint.matching import CheckpointError, Entry, entries
from tapas.checkpoint.parts import boxes
from tapas.checkpoint.sources import INDEX, SINGLE, require_safetensors
from tapas.checkpoint.team import team_of

_SHARD = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class Shard:
    file: str
    entries: tuple[Entry, ...]


def save_safetensors(module: nn.Module, path: str | os.PathLike[str], max_shard_bytes: int = 5_000_000_000) -> None:
    """Write the weights to a folder as `save_pretrained` does; other files in it are left alone.

    The first rank gathers one tensor at a time and writes one file at a time. Until all are written, the
    weights from before are the ones that are found.
    """
    folder, team = folders.real(path), team_of(module, saving=True)
    wanted = team.agree(lambda: _wanted(module))
    part = team.lead(lambda: _begin(folder))
    try:
        shards = _shards(wanted, max_shard_bytes, team.lead(lambda: _stem(folder, wanted, max_shard_bytes)))
        for shard in shards:
            gathered = {entry.name: whole(entry.name, entry.tensor, team) for entry in shard.entries}
            held = {name: tensor for name, tensor in gathered.items() if tensor is not None}
            team.lead(lambda held=held, shard=shard: _write(part / shard.file, held))
        team.lead(lambda: _commit(folder, part, shards))
    finally:
        if team.leads:
            folders.discard(part)


def _wanted(module: nn.Module) -> list[Entry]:
    found = entries(module)
    for entry in found:
        boxes(entry.name, entry.tensor)  # what is held is what the placements say
    return found


def _bytes(entry: Entry) -> int:
    return entry.tensor.numel() * entry.tensor.element_size()


def _split(wanted: Sequence[Entry], most: int) -> list[list[Entry]]:
    """In the module's order, each shard as full as it can be."""
    found: list[list[Entry]] = [[]]
    size = 0
    for entry in wanted:
        if found[-1] and size + _bytes(entry) > most:
            found.append([])
            size = 0
        found[-1].append(entry)
        size += _bytes(entry)
    return found


def _shards(wanted: Sequence[Entry], most: int, stem: str) -> list[Shard]:
    parts = _split(wanted, most)
    if len(parts) == 1:
        return [Shard(SINGLE, tuple(parts[0]))]
    return [Shard(f"{stem}-{i:05}-of-{len(parts):05}.safetensors", tuple(p)) for i, p in enumerate(parts, 1)]


def _stem(folder: Path, wanted: Sequence[Entry], most: int) -> str:
    """Shards never replace those of before, which an index may still point to."""
    for stem in ("model" if not i else f"model-{i}" for i in count()):
        shards = _shards(wanted, most, stem)
        if len(shards) == 1 or not any((folder / shard.file).exists() for shard in shards):
            return stem
    raise AssertionError


def _begin(folder: Path) -> Path:
    require_safetensors()
    if (folder.exists() and not folder.is_dir()) or folder.suffix == ".safetensors":
        raise CheckpointError(str(folder), "is not a folder", f"give the folder for {SINGLE}")
    return folders.begin(folder / "model")


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    try:
        require_safetensors().torch.save_file(tensors, path, metadata={"format": "pt"})
        folders.sync(path)
    except Exception as error:  # its errors have no common base
        raise CheckpointError(str(path), f"cannot be written: {error}", "the weights from before are kept") from None


def _commit(folder: Path, part: Path, shards: Sequence[Shard]) -> None:
    """Readers look for the single file, then for the index: each step leaves one complete set to be found."""
    if len(shards) == 1:
        os.replace(part / SINGLE, folder / SINGLE)
        (folder / INDEX).unlink(missing_ok=True)
    else:
        index = {
            "metadata": {"total_size": sum(_bytes(e) for shard in shards for e in shard.entries)},
            "weight_map": {e.name: shard.file for shard in shards for e in shard.entries},
        }
        for shard in shards:
            os.rename(part / shard.file, folder / shard.file)
        folders.write(part / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
        folders.sync(folder)
        os.replace(part / INDEX, folder / INDEX)
        (folder / SINGLE).unlink(missing_ok=True)
    folders.sync(folder)
    current = {shard.file for shard in shards}
    for old in list(folder.iterdir()):
        if _SHARD.fullmatch(old.name) and old.name not in current:
            old.unlink()
