"""Weights of a single device, read straight into a module: each rank reads its part only, of files that any part can be
read from."""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from tapas.checkpoint.module_state import Box, CheckpointError, Entry, boxes, check_shapes, entries, listed, match
from tapas.checkpoint.rank_group import rank_group_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_REMEDY = f"give a folder with {SINGLE} or {INDEX}, or one such file"


class Source(Protocol):
    place: str

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> Sequence[int]: ...

    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor: ...


class StateDict:
    """Tensors that are mapped into memory: only what is looked at is read."""

    def __init__(self, place: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.place, self._tensors = place, tensors

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> Sequence[int]:
        return self._tensors[name].shape

    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        return self._tensors[name][slices]


class Safetensors:
    def __init__(self, place: str, files: Mapping[Path, Collection[str] | None]) -> None:
        """`files` with the names that an index says are in them."""
        self.place = place
        self._home: dict[str, Any] = {}
        self._opened = [self._open(path, indexed) for path, indexed in files.items()]

    def _open(self, path: Path, indexed: Collection[str] | None) -> Any:
        safetensors = require_safetensors()
        try:
            file = safetensors.safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError:
            raise CheckpointError(self.place, f"{path.name} is missing", "download or save it again") from None
        except Exception as error:  # its errors have no common base
            raise CheckpointError(self.place, f"{path.name} cannot be read: {error}", _REMEDY) from None
        stored = set(file.keys())
        if indexed is not None and not set(indexed) <= stored:
            lost = listed(set(indexed) - stored)
            raise CheckpointError(self.place, f"{path.name} has no {lost}", "download or save it again")
        self._home |= dict.fromkeys(stored if indexed is None else indexed, file)
        return file

    @property
    def names(self) -> Collection[str]:
        return self._home.keys()

    def shape(self, name: str) -> Sequence[int]:
        return self._home[name].get_slice(name).get_shape()

    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        file = self._home[name]
        return file.get_slice(name)[slices] if slices else file.get_tensor(name)


def require_safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise CheckpointError(
            "safetensors", "is not installed", "pip install safetensors (or tapas-parallel[hf])"
        ) from None
    return safetensors


def open_safetensors(path: Path) -> Safetensors:
    """A folder as transformers writes it, or a file of it."""
    place = str(path)
    if not path.exists():
        raise CheckpointError(place, "does not exist", _REMEDY)
    if path.is_dir():
        weights_file = next((path / name for name in (SINGLE, INDEX) if (path / name).is_file()), None)
        if weights_file is None:
            raise CheckpointError(place, "has no weights", _REMEDY)
        path = weights_file
    if path.suffix != ".json":
        return Safetensors(place, {path: None})
    files: dict[Path, list[str]] = {}
    for name, file in read_index(path).items():
        if Path(file).name != file:
            raise CheckpointError(place, f"{name} is said to be in {file}", "do not trust it")
        files.setdefault(path.parent / file, []).append(name)
    return Safetensors(place, files)


def read_index(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(str(path), "is not an index of weights", _REMEDY) from None


def open_state_dict(path: Path) -> StateDict:
    place, remedy = str(path), "give a file made by torch.save(model.state_dict(), path)"
    try:
        try:
            tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(place, "does not exist", remedy) from None
    except Exception as error:  # a damaged pickle can raise anything
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(place, f"cannot be read as weights: {first}", remedy) from None
    if not isinstance(tensors, Mapping) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise CheckpointError(place, "is not a dict of tensors", remedy)
    return StateDict(place, tensors)


Work = list[tuple[str, list[Box]]]


def load_safetensors(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a folder as `save_pretrained` writes it, or a single .safetensors file."""
    _load(module, lambda: open_safetensors(Path(path)))


def load_weights(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a state_dict that `torch.save` wrote."""
    _load(module, lambda: open_state_dict(Path(path)))


def _load(module: nn.Module, opened: Callable[[], Source]) -> None:
    ranks = rank_group_of(module)
    source, work = ranks.agree(lambda: _check(module, opened()))
    ranks.agree(lambda: _read(source, work))


def _check(module: nn.Module, source: Source) -> tuple[Source, Work]:
    """What this rank is to read; nothing is changed."""
    matched = match(source.place, entries(module), source.names, {})
    check_shapes(source.place, matched, source.shape)
    work: Work = []
    for entry, names in matched:
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
