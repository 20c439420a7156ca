"""The ranks that hold a module: they agree on success, and one of them leads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tapas.checkpoint.module_state import CheckpointError, entries
from tapas.errors import TapasError

T = TypeVar("T")


@dataclass(frozen=True)
class RankGroup:
    together: bool  # whether there is anyone else to talk to
    group: Any = None  # None: the default process group
    rank: int = 0
    leader: int = 0  # its rank among all processes

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, value: Any) -> list[Any]:
        if not self.together:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, work: Callable[[], T]) -> T:
        """What `work` returns on this rank; where it fails on one rank, it fails on all."""
        value, failure, message = None, None, None
        try:
            value = work()
        except TapasError as error:
            failure, message = error, (error.place, error.fact, error.remedy)  # the error itself cannot be pickled
        except Exception as error:
            failure, message = error, (f"rank {self.rank}", f"{type(error).__name__}: {error}", "see its traceback")
        everyone = self.share(message)
        if failure is not None:
            raise failure
        other = next((s for s in everyone if s is not None), None)
        if other is not None:
            raise CheckpointError(*other)
        return value  # type: ignore[return-value]

    def lead(self, work: Callable[[], T]) -> T:
        """The first rank works, all of them get what it returns."""
        return self.share(self.agree(lambda: work() if self.leads else None))[0]


_groups: "WeakKeyDictionary[DeviceMesh, Any]" = WeakKeyDictionary()


def _group(mesh: DeviceMesh) -> Any:
    """A process group of exactly the ranks of a mesh."""
    if mesh.size() == dist.get_world_size():
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh not in _groups:  # the other processes know nothing of it
        _groups[mesh] = dist.new_group(sorted(mesh.mesh.flatten().tolist()), use_local_synchronization=True)
    return _groups[mesh]


def rank_group_of(module: nn.Module, *, saving: bool = False) -> RankGroup:
    meshes = {e.tensor.device_mesh for e in entries(module) if isinstance(e.tensor, DTensor)}
    if len(meshes) > 1:
        raise CheckpointError("module", f"its parameters are on {len(meshes)} meshes", "put them on one")
    ready = dist.is_available() and dist.is_initialized()
    if not ready or not (meshes or saving):
        return RankGroup(False)
    group = _group(meshes.pop()) if meshes else None
    return RankGroup(True, group, dist.get_rank(group), dist.get_global_rank(group, 0) if group is not None else 0)
