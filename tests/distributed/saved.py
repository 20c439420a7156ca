"""What workers do for the tests of checkpoints: make a module, load, train, save, and tell what they hold."""

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import tapas
from tapas.checkpoint import (
    CheckpointError,
    dcp,
    import_weights,
    load_checkpoint,
    load_safetensors,
    load_weights,
    save_checkpoint,
    save_safetensors,
)
from tapas.checkpoint.rank_group import _group
from tests.distributed.parallel import mesh_of, model_of, parallel_of

Mesh = tuple[int, ...]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.9)),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "local": lambda p: tapas.local_optimizer(torch.optim.AdamW, p, lr=1e-2, betas=(0.8, 0.9)),
}


def made(family: str, mesh: Mesh) -> tuple[nn.Module, dict[str, torch.Tensor]] | None:
    """A small model on a mesh (None on ranks beside it), or on a single device."""
    if not mesh:
        return model_of(family)
    grid = mesh_of(mesh)
    if grid.get_coordinate() is None:
        return None
    # 51 rows; and weights that are split in each of their parts
    megatron = [("*", "megatron")]
    pins = {"gpt2": [("transformer.wte.weight", "S(0)")], "packed": megatron, "quantised": megatron}
    _, inputs, module = parallel_of(family, grid, pins=pins.get(family, []))
    return module, inputs


def scramble(module: nn.Module) -> None:
    """Nothing of what is there may be what is looked for."""
    with torch.no_grad():
        for x in module.state_dict().values():
            x.copy_(torch.full_like(x, 7))


def positions(
    shape: Sequence[int], placements: Sequence[Any], mesh: Sequence[int], coord: Sequence[int]
) -> torch.Tensor:
    """Where in the whole tensor the elements are that a rank holds, by what placements mean and nothing else."""
    held = torch.arange(prod(shape)).reshape(shape)
    for placement, n, i in zip(placements, mesh, coord, strict=True):
        if isinstance(placement, Replicate):
            continue
        dim, parts = placement.dim, []
        for segment in held.chunk(getattr(placement, "split_factor", 1), dim):
            chunks = segment.chunk(n, dim)
            parts.append(chunks[i] if i < len(chunks) else segment.narrow(dim, 0, 0))
        held = torch.cat(parts, dim)
    return held


def placed(x: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    held = positions(x.shape, placements, mesh.shape, mesh.get_coordinate() or ())
    local = x.reshape(-1)[held.reshape(-1)].reshape(held.shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def assembled(tensors: dict[str, Any]) -> dict[str, Any]:
    """Whole tensors: torch's `full_tensor` does not know packed weights in all versions."""
    split = {name: x for name, x in tensors.items() if isinstance(x, DTensor)}
    mine = {}
    for name, x in split.items():
        mesh = x.device_mesh
        mine[name] = positions(x.shape, x.placements, mesh.shape, mesh.get_coordinate() or ()), x.detach().to_local()
    found = {name: x.detach().clone() if torch.is_tensor(x) else x for name, x in tensors.items()}
    if split:
        group = _group(next(iter(split.values())).device_mesh)
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
        for name, x in split.items():
            flat = torch.full((x.numel(),), 123, dtype=x.dtype)
            for rank in everyone:
                where, part = rank[name]
                assert where.shape == part.shape, name
                flat[where.reshape(-1)] = part.reshape(-1)
            found[name] = flat.reshape(x.shape)
    return found


def contents(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    found: dict[str, Any] = dict(module.state_dict())
    names = {id(p): name for name, p in module.named_parameters()}
    for p, state in (optimizer.state if optimizer else {}).items():
        found |= {f"{names[id(p)]}/{key}": x for key, x in state.items()}
    for i, group in enumerate(optimizer.param_groups if optimizer else ()):
        found |= {f"group {i}/{key}": x for key, x in group.items() if key != "params"}
    return assembled(found)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def run(
    rank: int, family: str, mesh: Mesh, kind: str, load: str | None, steps: int, save: str | None, more: int = 0
) -> dict[str, Any] | None:
    """Load, train, save, train on."""
    start = made(family, mesh)
    if start is None:
        return None
    module, inputs = start
    optimizer = OPTIMIZERS[kind](module.parameters())
    found: dict[str, Any] = {}
    if load:
        scramble(module)
        found["extra"] = load_checkpoint(load, module, optimizer)
        found["loaded"] = contents(module, optimizer)
    found["losses"] = train(module, optimizer, inputs, steps)
    if save:
        save_checkpoint(save, module, optimizer, {"rank": rank, "noise": torch.arange(3) + rank, "at": (1, 2.5)})
        found["saved"] = contents(module, optimizer)
    found["more"] = train(module, optimizer, inputs, more)
    split = [(p, q) for p in module.parameters() if isinstance(p, DTensor) for q in p.placements]
    found["strided"] = sum(hasattr(q, "split_factor") for _, q in split)
    found["uneven"] = sum(q.is_shard() and p.shape[q.dim] % prod(mesh) != 0 for p, q in split)
    return found


class Hand(nn.Module):
    """Parameters on a mesh with placements by hand: split unevenly, to nothing, twice, in segments."""

    SHAPES: ClassVar[dict[str, tuple[int, ...]]] = {
        "a": (5, 3),
        "b": (7,),
        "c": (24, 4),
        "d": (),
        "e": (2, 11, 2),
        "f": (0, 4),
    }

    def __init__(self, mesh: DeviceMesh | None = None, placements: dict[str, Any] | None = None) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(self.SHAPES.items()):
            x = torch.arange(prod(shape), dtype=torch.float32).reshape(shape) + 1000 * i
            if mesh is not None and placements is not None:
                x = placed(x, mesh, placements[name])
            self.register_parameter(name, nn.Parameter(x))
        self.register_buffer("g", torch.arange(4))


def by_hand(rank: int, mesh: Mesh, placements: dict[str, Any], load: str | None, save: str) -> dict[str, Any] | None:
    grid = mesh_of(mesh)
    if grid.get_coordinate() is None:
        return None
    module = Hand(grid, placements)
    if load:
        scramble(module)
        load_checkpoint(load, module)
    save_checkpoint(save, module)
    save_safetensors(module, save + "-weights", 200)
    scramble(module)
    load_safetensors(module, save + "-weights")
    return contents(module)


def steps_by_hand(
    rank: int, mesh: Mesh, placements: dict[str, Any], kind: str, load: str | None, save: str
) -> dict[str, Any] | None:
    grid = mesh_of(mesh) if mesh else None
    if grid is not None and grid.get_coordinate() is None:
        return None
    module = Hand(grid, placements)
    optimizer = OPTIMIZERS[kind](module.parameters())
    if load:
        scramble(module)
        load_checkpoint(load, module, optimizer)
    for p in module.parameters():
        p.grad = p.detach() / 1000 + 1
    optimizer.step()
    save_checkpoint(save, module, optimizer)
    assert not any(isinstance(state.get("step"), DTensor) for state in optimizer.state.values())
    return contents(module, optimizer)


def failing(rank: int, path: str, where: int) -> str:
    """Save while one rank cannot write."""
    module = Hand(mesh_of((4,)), dict.fromkeys(Hand.SHAPES, ()) | _replicated(1))
    original = dcp._SavePlanner.resolve_data

    def broken(self: Any, item: Any) -> Any:
        raise OSError(28, "No space left on device")

    if rank == where:
        dcp._SavePlanner.resolve_data = broken  # type: ignore[method-assign]
    try:
        save_checkpoint(path, module)
    except CheckpointError as error:
        return str(error)
    finally:
        dcp._SavePlanner.resolve_data = original  # type: ignore[method-assign]
    return "saved"


def _replicated(axes: int) -> dict[str, Any]:
    # so that every rank has something to write
    return dict.fromkeys(Hand.SHAPES, [Replicate()] * axes) | {"c": [Shard(0)] + [Replicate()] * (axes - 1)}


def refused(rank: int, path: str) -> tuple[str, bool]:
    """Load what does not fit: the error, and whether everything is as before."""
    module = Hand(mesh_of((4,)), _replicated(1))
    before = contents(module)
    try:
        load_checkpoint(path, module)
    except CheckpointError as error:
        after = contents(module)
        return str(error), all(torch.equal(before[name], after[name]) for name in before)
    return "", False


def on_part_of_the_world(rank: int, path: str) -> dict[str, Any] | None:
    """A mesh of two axes that is not all processes."""
    grid = mesh_of((1, 2))
    if grid.get_coordinate() is None:
        return None
    module = Hand(grid, _replicated(2))
    save_checkpoint(path, module)
    scramble(module)
    load_checkpoint(path, module)
    return contents(module)


def replicas(rank: int, path: str) -> None:
    """Every process has a plain module."""
    save_checkpoint(path, Hand())
    dist.barrier()


def exported(rank: int, family: str, mesh: Mesh, folder: str, most: int) -> dict[str, Any] | None:
    start = made(family, mesh)
    if start is None:
        return None
    save_safetensors(start[0], folder, most)
    return contents(start[0])


def imported(rank: int, family: str, mesh: Mesh, path: str) -> tuple[dict[str, Any], int, int]:
    """What was loaded, how many elements were read, and how many this rank holds."""
    start = made(family, mesh)
    assert start is not None
    module, _ = start
    scramble(module)
    read = 0
    original = import_weights.Safetensors.part

    def counting(self: Any, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        nonlocal read
        found = original(self, name, slices)
        read += found.numel()
        return found

    import_weights.Safetensors.part = counting  # type: ignore[method-assign]
    try:
        (load_safetensors if Path(path).suffix != ".pt" else load_weights)(module, path)
    finally:
        import_weights.Safetensors.part = original  # type: ignore[method-assign]
    tensors = {id(x): x for x in module.state_dict(keep_vars=True).values()}.values()
    held = sum((x.to_local() if isinstance(x, DTensor) else x).numel() for x in tensors)
    return contents(module), read, held
