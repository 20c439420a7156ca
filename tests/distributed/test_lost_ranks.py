"""A rank that ends or hangs in a collective: the others say which one it is, of which module, and who is missing."""

import multiprocessing
import os
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import IMPORTED

START = timedelta(seconds=119)  # to make all ranks' modules,
WAITED = timedelta(seconds=3)  # and to wait for one that sleeps


@dataclass(frozen=True)
class Loss:
    """What one rank does in the midst of a step: in its `nth` collective of a kind."""

    mesh: tuple[int, ...]
    family: str
    pins: str
    rank: int
    how: str  # "exit" or "sleep"
    phase: str
    kind: str
    nth: int
    pieces: int = 1

    @property
    def name(self) -> str:
        return f"{self.how}-{self.phase}-{self.kind}"


def lose(loss: Loss) -> None:
    """Before the collective is started."""
    from tapas.runtime.collectives import Count

    original, times = Count.add, 0

    def add(self: Count, phase: str, kind: str, axes: Any, nbytes: int) -> None:
        nonlocal times
        times += (phase, kind) == (loss.phase, loss.kind)
        if times == loss.nth:
            os._exit(7) if loss.how == "exit" else time.sleep(60)
        original(self, phase, kind, axes, nbytes)

    Count.add = add  # type: ignore[method-assign]


def take_a_step(rank: int, store: str, loss: Loss, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    from tapas._torch import timeout_of
    from tapas.errors import TapasError
    from tapas.runtime import lost_ranks
    from tapas.runtime.module import executor_of
    from tests.distributed.parallel import mesh_of, parallel_of

    torch.set_num_threads(1)
    lost_ranks.PATIENCE = 1.5
    world = prod(loss.mesh)
    met = dist.FileStore(store, world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=met, rank=rank, world_size=world, timeout=START)
    _, inputs, module = parallel_of(loss.family, mesh_of(loss.mesh), pins=[("*", loss.pins)], pieces=loss.pieces)
    module(**inputs)["loss"].backward()
    executor = executor_of(module)
    beside = [group for side in (executor.groups, executor.pieces) for group in side.groups.values()]  # type: ignore[attr-defined]
    groups = [*beside, *(axis.group for axis in executor.rank.wires)]  # type: ignore[attr-defined]
    assert all(timeout_of(group, "cpu") == START for group in beside)
    dist.barrier()
    for group in groups if loss.how == "sleep" else []:
        dist.distributed_c10d._set_pg_timeout(WAITED, group)  # type: ignore[attr-defined]
    if rank == loss.rank:
        lose(loss)
    try:
        module(**inputs)["loss"].backward()
        pipe.send("nothing happened")
    except TapasError as error:
        pipe.send(f"{type(error).__name__} {error}")
    time.sleep(0.2)  # others may still look at what it has said
    os._exit(0)


def survivors(tmp_path: Path, loss: Loss) -> dict[int, str]:
    """What the others have to say, by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    said, pipes, processes = {}, {}, []
    for rank in range(prod(loss.mesh)):
        here, there = context.Pipe()
        process = context.Process(target=take_a_step, args=(rank, str(tmp_path / "store"), loss, there))
        process.start()
        there.close()
        processes.append(process)
        if rank != loss.rank:
            pipes[here] = rank
    try:
        end = time.monotonic() + 120
        while pipes:
            ready = wait(list(pipes), end - time.monotonic())
            assert ready, f"ranks {list(pipes.values())} hang"
            for pipe in ready:
                said[pipes.pop(pipe)] = pipe.recv()  # type: ignore[union-attr, call-overload]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return said


full = pytest.mark.full

# `deep_llama` has five layers, in each of which a sum goes over ranks in either pass, and a norm after them; of `deep`,
# which has six, all weights of a layer are gathered together, and their gradients are scattered together.
CASES = [
    (Loss((2,), "deep_llama", "megatron", 1, "exit", "forward", "all_reduce", 4), r"model\.layers\.3: "),
    (Loss((2,), "deep_llama", "megatron", 1, "exit", "backward", "all_reduce", 4), r"model\.layers\.2\.\w+: "),
    pytest.param(  # of several survivors some may have heard from one that gave up before them
        Loss((2, 2), "deep", "fsdp", 3, "sleep", "forward", "all_gather", 5),
        r"weights of layers\.4 \(6 .*\): ", marks=full,
    ),
    pytest.param(
        Loss((2,), "deep", "fsdp", 1, "sleep", "forward", "all_gather", 5), r"weights of layers\.4 \(6 .*\): "
    ),
    pytest.param(
        Loss((2,), "deep_llama", "megatron", 0, "sleep", "forward", "all_reduce", 1),
        r"model\.layers\.0: ", marks=full,
    ),
    pytest.param(
        Loss((2,), "deep", "fsdp", 0, "exit", "backward", "reduce_scatter", 5),
        r"gradients of layers\.\d \(6 parameters.*\): ", marks=full,
    ),
    pytest.param(
        Loss((2,), "deep", "ddp", 0, "exit", "backward", "all_reduce", 1),
        r"gradients of model \(38 parameters.*\): ", marks=full,
    ),
    pytest.param(
        Loss((2,), "deep_llama", "megatron-sp", 1, "sleep", "forward", "all_gather", 6, pieces=2),
        r"model\.layers\.0\.post_attention_layernorm -> model\.layers\.0\.mlp\.gate_proj: ", marks=full,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "place"), CASES, ids=lambda value: value.name if isinstance(value, Loss) else "")
def test_a_lost_rank_is_named(tmp_path: Path, loss: Loss, place: str) -> None:
    said = survivors(tmp_path, loss)
    assert said.keys() == set(range(prod(loss.mesh))) - {loss.rank}
    for text in said.values():
        kind, axes = loss.kind.replace("_", "-"), "axis 0" if len(loss.mesh) == 1 else "axes 0, 1"
        where = (
            rf"CollectiveFailed {place}{kind} over {axes} in the {loss.phase} pass \([\d,]+ bytes, collective \d+\) "
        )
        assert re.match(where + rf"failed: rank {loss.rank} did not arrive \(.+\); ", text), text
