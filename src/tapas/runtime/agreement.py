"""Do all ranks have the same? One number per tensor tells, compared in one small collective."""

import hashlib
from collections.abc import Mapping
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tapas.runtime.collectives import Rank

SAMPLE = 1 << 13  # so many elements of a tensor are looked at: who drew other numbers differs in all of them
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A number, of the bits of some of its elements and of where they stand."""
    flat = tensor.detach()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
    flat = flat[:: -(-flat.numel() // SAMPLE) or 1].contiguous()
    bits = flat.view(_BITS[flat.element_size()]).to(torch.int64)
    return (bits * _weights(flat.device)[: bits.numel()]).sum() >> 1  # so that it can be negated


@cache
def _weights(device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * SAMPLE, 2, device=device) * 2654435761


def differing(tensors: Mapping[str, torch.Tensor], rank: Rank) -> str | None:
    """The first of these tensors that is not the same on all ranks. All of them ask, and get the same answer."""
    if not tensors or not any(axis.size > 1 for axis in rank.wires):
        return None
    mine = torch.stack([fingerprint(t).to(rank.device) for t in tensors.values()])
    most = torch.stack([mine, -mine])
    for axis in rank.wires:
        most = axis.all_reduce(most, "max")
    wrong = (most[0] != -most[1]).tolist()
    return next((name for name, differs in zip(tensors, wrong, strict=True) if differs), None)


def same_text(text: str, device_mesh: DeviceMesh) -> bool:
    """Whether it is the same on all ranks of a mesh. All of them ask, and get the same answer."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    most = torch.tensor([number, -number], device=device_mesh.device_type)
    for dim in range(device_mesh.ndim):
        dist.all_reduce(most, dist.ReduceOp.MAX, group=device_mesh.get_group(dim))
    return bool(most[0] == -most[1])


def from_first(tensor: torch.Tensor, device_mesh: DeviceMesh) -> torch.Tensor:
    """What the first rank of a mesh has."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    raw = tensor.view(-1).view(torch.uint8)  # not every backend sends every type
    for dim in range(device_mesh.ndim):
        group = device_mesh.get_group(dim)
        dist.broadcast(raw, src=dist.get_global_rank(group, 0), group=group)
    return tensor


def first_seed(device_mesh: DeviceMesh) -> int:
    """The seed of the first rank of a mesh; its generator is left alone."""
    seed = torch.tensor(torch.initial_seed() % 2**62, device=device_mesh.device_type)
    return int(from_first(seed, device_mesh))
