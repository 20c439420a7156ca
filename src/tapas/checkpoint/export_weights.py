"""A module's weights as transformers stores them, put together on the first rank one tensor at a time."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tapas.checkpoint import atomic_folder
from tapas.checkpoint.import_weights import INDEX, SINGLE, require_safetensors
from tapas.checkpoint.module_state import CheckpointError, Entry, Ranges, boxes, cut, entries, local, ranges_at
from tapas.checkpoint.rank_group import RankGroup, rank_group_of

_SHARD = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class ShardFile:
    file: str
    entries: tuple[Entry, ...]


def save_safetensors(module: nn.Module, path: str | os.PathLike[str], max_shard_bytes: int = 5_000_000_000) -> None:
    """Write the weights to a folder as `save_pretrained` does; other files in it are left alone.

    The first rank gathers one tensor at a time and writes one file at a time. Until all are written, the
    weights from before are the ones that are found.
    """
    folder, ranks = atomic_folder.real(path), rank_group_of(module, saving=True)
    wanted = ranks.agree(lambda: _wanted(module))
    part = ranks.lead(lambda: _begin(folder))
    try:
        shards = _shards(wanted, max_shard_bytes, ranks.lead(lambda: _stem(folder, wanted, max_shard_bytes)))
        for shard in shards:
            gathered = {entry.name: whole(entry.name, entry.tensor, ranks) for entry in shard.entries}
            held = {name: tensor for name, tensor in gathered.items() if tensor is not None}
            ranks.lead(lambda held=held, shard=shard: _write(part / shard.file, held))
        ranks.lead(lambda: _commit(folder, part, shards))
    finally:
        if ranks.leads:
            atomic_folder.discard(part)


def _wanted(module: nn.Module) -> list[Entry]:
    wanted = entries(module)
    for entry in wanted:
        boxes(entry.name, entry.tensor)  # what is held is what the placements say
    return wanted


def _bytes(entry: Entry) -> int:
    return entry.tensor.numel() * entry.tensor.element_size()


def _split(wanted: Sequence[Entry], most: int) -> list[list[Entry]]:
    """In the module's order, each shard as full as it can be."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in wanted:
        if shards[-1] and size + _bytes(entry) > most:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += _bytes(entry)
    return shards


def _shards(wanted: Sequence[Entry], most: int, stem: str) -> list[ShardFile]:
    parts = _split(wanted, most)
    if len(parts) == 1:
        return [ShardFile(SINGLE, tuple(parts[0]))]
    return [ShardFile(f"{stem}-{i:05}-of-{len(parts):05}.safetensors", tuple(p)) for i, p in enumerate(parts, 1)]


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
    return atomic_folder.begin(folder / "model")


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    try:
        require_safetensors().torch.save_file(tensors, path, metadata={"format": "pt"})
        atomic_folder.sync(path)
    except Exception as error:  # its errors have no common base
        raise CheckpointError(str(path), f"cannot be written: {error}", "the weights from before are kept") from None


def _commit(folder: Path, part: Path, shards: Sequence[ShardFile]) -> None:
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
        atomic_folder.write(part / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
        atomic_folder.sync(folder)
        os.replace(part / INDEX, folder / INDEX)
        (folder / SINGLE).unlink(missing_ok=True)
    atomic_folder.sync(folder)
    current = {shard.file for shard in shards}
    for old in list(folder.iterdir()):
        if _SHARD.fullmatch(old.name) and old.name not in current:
            old.unlink()


def whole(name: str, tensor: torch.Tensor, ranks: RankGroup) -> torch.Tensor | None:
    """The whole tensor, in the CPU's memory, on the first rank; None on the others.

    Parts are sent one after the other, so that no rank holds more than its own and, the first one, the whole.
    """
    if not isinstance(tensor, DTensor):
        return local(tensor).cpu().clone().contiguous() if ranks.leads else None
    holders = _holders(name, tensor, ranks.leader)
    mine = local(tensor).contiguous()
    me = dist.get_rank()
    made = torch.empty(tensor.shape, dtype=tensor.dtype) if ranks.leads else None
    for held, rank in holders:
        shape = [sum(stop - start for start, stop in ranges) for ranges in held]
        if me == rank != ranks.leader:
            dist.send(_bits(mine), ranks.leader, group=ranks.group)
        if made is not None:
            part = mine
            if rank != me:
                part = torch.empty(shape, dtype=mine.dtype, device=mine.device)
                dist.recv(_bits(part), rank, group=ranks.group)
            for box in cut(part.cpu(), held):
                made[box.slices].copy_(box.view)
    return made


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Not every backend sends every dtype."""
    return x.view(-1).view(torch.uint8)


def _holders(name: str, tensor: DTensor, leader: int) -> list[tuple[list[Ranges], int]]:
    """Each distinct part, and the one rank to take it from: the leader itself where it can be."""
    mesh = tensor.device_mesh
    holders: dict[tuple[Ranges, ...], int] = {}
    for coord in product(*map(range, mesh.shape)):
        held, rank = tuple(ranges_at(name, tensor, coord)), int(mesh.mesh[coord])
        if all(held) and (held not in holders or rank == leader):
            holders[held] = rank
    return [(list(held), rank) for held, rank in holders.items()]
