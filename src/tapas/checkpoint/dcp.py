"""torch.distributed.checkpoint, taught what boxes a rank holds and not to unpickle what it does not know."""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tapas._torch import CHECKPOINT_CLASSES
from tapas.checkpoint.module_state import Box, CheckpointError, boxes
from tapas.checkpoint.rank_group import RankGroup

METADATA = ".metadata"


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class _SavePlanner(DefaultSavePlanner):
    """Writes the boxes of this rank; what several ranks hold is written by one of them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors = tensors
        self.views: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, tensor in self.tensors.items():
            properties = TensorProperties(dtype=tensor.dtype)
            for box in boxes(name, tensor):
                index = MetadataIndex(name, box.offsets)
                data = TensorWriteData(_chunk(box), properties, torch.Size(tensor.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self.views[index] = box.view
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.views[write_item.index].contiguous()


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """A tensor to be read, and the name under which it is stored."""

    stored: str
    tensor: torch.Tensor


class _LoadPlanner(DefaultLoadPlanner):
    """Reads what overlaps with the boxes of this rank, straight into its memory."""

    def __init__(self, targets: Mapping[str, ReadTarget]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.targets = targets
        self.views: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, target in self.targets.items():
            saved = self.metadata.state_dict_metadata[target.stored]
            assert isinstance(saved, TensorStorageMetadata)
            mine = boxes(target.stored, target.tensor)
            self.views |= {MetadataIndex(key, box.offsets): box.view for box in mine}
            # one stored tensor may have several targets: weights that were tied and are not any more
            items += [
                replace(item, dest_index=replace(item.dest_index, fqn=key))
                for item in create_read_items_for_chunk_list(target.stored, saved, [_chunk(box) for box in mine])
            ]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.views[index]

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("only tensors are stored")


class _StorageWriter(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # not where it was written


class _StorageReader(FileSystemReader):
    """`FileSystemReader` executes whatever the pickled metadata says."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in CHECKPOINT_CLASSES.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


def read_metadata(folder: Path) -> Metadata:
    """What is stored in a folder, all of whose files are there."""
    try:
        with open(folder / METADATA, "rb") as file:
            metadata = _Unpickler(file).load()
        sizes: dict[str, int] = {}
        for index, where in metadata.storage_data.items():
            name = str(where.relative_path)
            if Path(name).name != name:
                raise CheckpointError(str(folder), f"{index.fqn} is said to be in {name}", "do not trust it")
            if name not in sizes:
                sizes[name] = (folder / name).stat().st_size
            if sizes[name] < where.offset + where.length:
                raise CheckpointError(str(folder), f"{name} is cut off", "use another checkpoint")
        for name, saved in metadata.state_dict_metadata.items():
            known = [chunk for chunk in saved.chunks if MetadataIndex(name, chunk.offsets) in metadata.storage_data]
            if sum(prod(chunk.sizes) for chunk in known) != prod(saved.size):
                raise CheckpointError(str(folder), f"a part of {name} is missing", "use another checkpoint")
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        missing = Path(error.filename or "").name
        raise CheckpointError(str(folder), f"is incomplete: it has no {missing}", "use another checkpoint") from None
    except OSError as error:
        raise CheckpointError(str(folder), f"cannot be read: {error.strerror}", "use another checkpoint") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(str(folder), f"is damaged: {error}", "use another checkpoint") from None
    return metadata


@contextmanager
def _calls() -> Iterator[None]:
    """Being alone is meant, and errors are like others."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:  # not an Exception
            first = next(iter(error.failures.values()))[0]
            raise first from error


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], ranks: RankGroup) -> None:
    with _calls():
        save(
            {}, storage_writer=_StorageWriter(folder), planner=_SavePlanner(tensors),
            process_group=ranks.group, no_dist=not ranks.together,
        )  # fmt: skip


def read_tensors(folder: Path, targets: Mapping[str, ReadTarget]) -> None:
    """No rank needs another one to read."""
    with _calls():
        load({}, storage_reader=_StorageReader(folder), planner=_LoadPlanner(targets), no_dist=True)
