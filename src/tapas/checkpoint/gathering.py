"""A whole tensor on the first rank, put together from the ranks that hold its parts."""

from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tapas.checkpoint.parts import Ranges, local, ranges_at
from tapas.checkpoint.team import Team


def whole(name: str, tensor: torch.Tensor, team: Team) -> torch.Tensor | None:
    """The whole tensor, in the CPU's memory, on the first rank; None on the others.

    Parts are sent one after the other, so that no rank holds more than its own and, the first one, the whole.
    """
    if not isinstance(tensor, DTensor):
        return local(tensor).cpu().clone().contiguous() if team.leads else None
    holders = _holders(name, tensor, team.leader)
    mine = local(tensor).contiguous()
    me = dist.get_rank()
    made = torch.empty(tensor.shape, dtype=tensor.dtype) if team.leads else None
    for held, rank in holders:
        shape = [sum(stop - start for start, stop in ranges) for ranges in held]
        if me == rank != team.leader:
            dist.send(_bits(mine), team.leader, group=team.group)
        if made is not None:
            part = mine
            if rank != me:
                part = torch.empty(shape, dtype=mine.dtype, device=mine.device)
                dist.recv(_bits(part), rank, group=team.group)
            _put(made, part.cpu(), held)
    return made


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Not every backend sends every dtype."""
    return x.view(-1).view(torch.uint8)


def _holders(name: str, tensor: DTensor, leader: int) -> list[tuple[list[Ranges], int]]:
    """Each distinct part, and the one rank to take it from: the leader itself where it can be."""
    mesh = tensor.device_mesh
    found: dict[tuple[Ranges, ...], int] = {}
    for coord in product(*map(range, mesh.shape)):
        held, rank = tuple(ranges_at(name, tensor, coord)), int(mesh.mesh[coord])
        if all(held) and (held not in found or rank == leader):
            found[held] = rank
    return [(list(held), rank) for held, rank in found.items()]


def _put(made: torch.Tensor, part: torch.Tensor, held: list[Ranges]) -> None:
    for choice in product(*(range(len(ranges)) for ranges in held)):
        source, target = part, made
        for dim, k in enumerate(choice):
            start, stop = held[dim][k]
            source = source.narrow(dim, sum(b - a for a, b in held[dim][:k]), stop - start)
            target = target.narrow(dim, start, stop - start)
        target.copy_(source)
