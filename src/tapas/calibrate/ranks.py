"""Several ranks that measure at once, as they will compute: started by torchrun, or one alone."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tapas.errors import TapasError


@dataclass(frozen=True)
class Ranks:
    """Who measures. `inner` joins the ranks of a node, `outer` those with the same number in their nodes."""

    number: int = 0
    world: int = 1
    per_node: int = 1
    inner: Any = None
    outer: Any = None

    def mean(self, values: Sequence[float]) -> list[float]:
        """All ranks go on with the same figures."""
        if self.world == 1:
            return list(values)
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, list(values))
        return [sum(some) / self.world for some in zip(*found, strict=True)]

    def together(self) -> None:
        if self.world > 1:
            dist.barrier()


@contextmanager
def ranks(device: torch.device) -> Iterator[Ranks]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % per_node:
        raise TapasError("torchrun", f"{world} ranks on nodes of {per_node}", "start as many on every node")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend)
    try:
        number, nodes = dist.get_rank(), world // per_node
        inner = [dist.new_group([n * per_node + i for i in range(per_node)]) for n in range(nodes)]
        outer = [dist.new_group([n * per_node + i for n in range(nodes)]) for i in range(per_node)]
        yield Ranks(
            number, world, per_node,
            inner[number // per_node] if per_node > 1 else None, outer[number % per_node] if nodes > 1 else None,
        )  # fmt: skip
    finally:
        dist.destroy_process_group()
