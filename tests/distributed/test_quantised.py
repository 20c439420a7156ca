"""Quantised weights on ranks: DTensor buffers under the names that they have in the model."""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tapas.checkpoint import load_safetensors, save_safetensors
from tests.distributed.parallel import mesh_of, parallel_of
from tests.distributed.pool import Pool


def as_buffers(rank: int, path: str) -> list[Any]:
    """What is wrong."""
    mesh = mesh_of((2, 2))
    model, inputs, parallel = parallel_of("quantised", mesh, pins=[("*", "megatron")])
    wanted, buffers = model.state_dict(), dict(parallel.named_buffers())
    split = {name for name, t in buffers.items() if isinstance(t, DTensor) and t.to_local().numel() < t.numel()}
    wrong: list[Any] = [name for name in wanted if name.endswith("mlp.up_proj.base.q") and name not in split]
    wrong += list(set(dict(parallel.named_parameters())) ^ set(dict(model.named_parameters())))
    wrong += list(parallel.state_dict().keys() ^ wanted.keys())  # zeros are in no checkpoint

    save_safetensors(parallel, path)
    if rank == 0:
        held = load_file(f"{path}/model.safetensors")
        wrong += [name for name, t in held.items() if not torch.equal(t, wanted[name])]
    with torch.no_grad():
        before = parallel(**inputs)["loss"]
        twin = copy.deepcopy(parallel)
        for name in split:
            buffers[name].to_local().zero_()
        other = parallel(**inputs)["loss"]
        load_safetensors(parallel, path)
        again, untouched = parallel(**inputs)["loss"], twin(**inputs)["loss"]
    return (
        wrong + [x for x in (again, untouched) if float(x) != float(before)] + [other] * (float(other) == float(before))
    )


def test_as_buffers(pool: Pool, tmp_path: Path) -> None:
    assert pool(as_buffers, str(tmp_path / "weights")) == [[]] * 4
