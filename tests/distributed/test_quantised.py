"""Quantised weights on ranks: DTensor buffers under the names that they have in the model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

import tapas
from tapas._torch import whole_tensor
from tapas.checkpoint import load_safetensors, save_safetensors
from tests.distributed.parallel import mesh_of, parallel_of
from tests.distributed.pool import Pool
from tests.distributed.small import EAGER


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


class Cast(nn.Module):
    """A weight in a type that not all backends send."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("w", torch.linspace(-9, 9, 96 * 64).view(96, 64).to(dtype))

    def forward(self, x):
        return F.linear(x, self.w.to(x.dtype))


def sent_as_bits(rank: int, dtype: torch.dtype) -> list[Any]:
    """Gathered, and exchanged: what comes of it, and of one device."""
    mesh, inputs = mesh_of((4,)), (torch.ones(4, 64, dtype=torch.float64),)
    model, found = nn.Sequential(Cast(dtype)), list[Any]()
    for pins in ({"*": "fsdp"}, {"0.w": "S(1)", "0": "[n]"}):
        parallel = tapas.parallelize(model, inputs, mesh=mesh, cluster=EAGER, pins=pins)
        found.append(torch.equal(whole_tensor(parallel(*inputs)), model(*inputs)))
    return found


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int16], ids=["float8", "int16"])
def test_types_that_backends_do_not_send(pool: Pool, dtype: torch.dtype) -> None:
    assert pool(sent_as_bits, dtype) == [[True, True]] * 4


def test_as_buffers(pool: Pool, tmp_path: Path) -> None:
    assert pool(as_buffers, str(tmp_path / "weights")) == [[]] * 4
