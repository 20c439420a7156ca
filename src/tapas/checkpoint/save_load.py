"""Everything to go on training, stored so that any mesh, plan or single device can go on."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tapas.checkpoint import atomic_folder
from tapas.checkpoint.dcp import ReadTarget, read_metadata, read_tensors, write_tensors
from tapas.checkpoint.module_state import CheckpointError, check_shapes, entries, match
from tapas.checkpoint.rank_group import RankGroup, rank_group_of
from tapas.checkpoint.training_state import Restored, decode, describe, empty, encode, restore, tensor_names

MANIFEST = "tapas.json"
VERSION = 1
MODEL = "model."


def save_checkpoint(
    path: str | os.PathLike[str], module: nn.Module, optimizer: Optimizer | None = None, extra: Any = None
) -> None:
    """Store weights, optimizer state and `extra` (plain data and tensors, those of the first rank) in a folder.

    The folder appears, or replaces the one from before, when all ranks have written their part; all of them
    have to see the same file system. Nothing in it tells on which mesh it was made.
    """
    target, ranks = atomic_folder.real(path), rank_group_of(module, saving=True)
    tensors: dict[str, torch.Tensor] = {}
    manifest = ranks.agree(lambda: _describe(module, optimizer, extra, tensors, ranks))
    part = ranks.lead(lambda: _begin(target))
    try:
        write_tensors(part, tensors, ranks)
        ranks.lead(lambda: _finish(part, target, manifest))
    except Exception as error:
        if ranks.leads:
            atomic_folder.discard(part)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(str(target), f"was not written: {error}", "the one from before is unchanged") from error


def _describe(
    module: nn.Module, optimizer: Optimizer | None, extra: Any, tensors: dict[str, torch.Tensor], ranks: RankGroup
) -> dict[str, Any]:
    wanted = entries(module)
    tensors |= {MODEL + entry.name: entry.tensor for entry in wanted}
    optimizer_state = describe(optimizer, wanted, tensors) if optimizer is not None else None
    beside: dict[str, torch.Tensor] = {}
    kept = encode(extra, "extra", beside)
    for name, tensor in beside.items():
        if isinstance(tensor, DTensor):
            raise CheckpointError(name, "is a DTensor", "keep it in the module, or give tensor.full_tensor()")
    if ranks.leads:
        tensors |= beside
    aliases = {other: entry.name for entry in wanted for other in entry.names[1:]}
    return {"format": VERSION, "aliases": aliases, "optimizer": optimizer_state, "extra": kept}


def _begin(target: Path) -> Path:
    if target.exists() and not (target / MANIFEST).is_file() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(str(target), "exists and is not a checkpoint", "save to another path")
    return atomic_folder.begin(target)


def _finish(part: Path, target: Path, manifest: dict[str, Any]) -> None:
    try:
        read_metadata(part)
    except CheckpointError as error:
        raise CheckpointError(
            str(target), f"was not written: {error.fact}", "save to a file system that all ranks see"
        ) from None
    atomic_folder.write(part / MANIFEST, json.dumps(manifest))
    atomic_folder.finish(part, target)


def load_checkpoint(path: str | os.PathLike[str], module: nn.Module, optimizer: Optimizer | None = None) -> Any:
    """Load what `save_checkpoint` stored, and return its `extra`.

    `module` may be parallel in any way, or the plain model. Names and shapes are checked before anything is
    changed. An optimizer's state that is there already is overwritten in place.
    """
    ranks = rank_group_of(module)
    loading = ranks.agree(
        lambda: _CheckpointReader(atomic_folder.standing(atomic_folder.real(path)), str(path), module, optimizer)
    )
    return ranks.agree(loading.read)


class _CheckpointReader:
    """Everything a load needs, checked."""

    def __init__(self, folder: Path, place: str, module: nn.Module, optimizer: Optimizer | None) -> None:
        self.folder, self.place = folder, place
        self.manifest = _read_manifest(folder, place)
        metadata: dict[str, Any] = read_metadata(folder).state_dict_metadata
        stored = {name.removeprefix(MODEL) for name in metadata if name.startswith(MODEL)}
        matched = match(place, entries(module), stored, self.manifest["aliases"])
        check_shapes(place, matched, lambda name: metadata[MODEL + name].size)
        for _, names in matched:
            if len(names) > 1:
                raise CheckpointError(place, f"{' and '.join(names)} are two tensors, the module has one", "untie them")
        self.targets = {MODEL + e.name: ReadTarget(MODEL + names[0], e.tensor) for e, names in matched}
        self.extra = {name: empty(metadata[name]) for name in tensor_names(self.manifest["extra"])}
        self.targets |= {name: ReadTarget(name, tensor) for name, tensor in self.extra.items()}
        self.restored: Restored | None = None
        if optimizer is not None:
            optimizer_state = self.manifest["optimizer"]
            if optimizer_state is None:
                raise CheckpointError(place, "has no optimizer state", "load it without an optimizer")
            self.restored = restore(place, optimizer, matched, optimizer_state, metadata)
            self.targets |= self.restored.targets

    def read(self) -> Any:
        try:
            read_tensors(self.folder, self.targets)
        except Exception as error:
            raise CheckpointError(self.place, f"cannot be read: {error}", "the module is loaded in part") from error
        if self.restored is not None:
            self.restored.finish()
        return decode(self.manifest["extra"], self.extra)


def _read_manifest(folder: Path, place: str) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        fact = "is not a complete checkpoint" if folder.exists() else "does not exist"
        raise CheckpointError(place, fact, "give a folder made by save_checkpoint") from None
    except OSError as error:
        raise CheckpointError(
            place, f"cannot be read: {error.strerror}", "give a folder made by save_checkpoint"
        ) from None
    except ValueError:
        raise CheckpointError(place, f"{MANIFEST} is damaged", "use another checkpoint") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != VERSION or not {"aliases", "optimizer", "extra"} <= manifest.keys():
        raise CheckpointError(place, f"has format {version}, this TAPAS reads {VERSION}", "save it again")
    return manifest
