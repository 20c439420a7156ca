"""Moves as linear operators on real process groups: <F x, y> = <x, F* y>."""

import pytest
import torch

from tapas.runtime.collectives import mesh_axes
from tapas.verify.threads import run_threads, thread_axes
from tests.distributed.linear import check_routes, run_routes
from tests.distributed.pool import Pool

PROCESSES = [(2,), (3,), (4,), (2, 2)]
THREADS = [(8,), (4, 2), (2, 3), (2, 2, 2)]
LIMIT = 200


def on_processes(rank: int, mesh: tuple[int, ...], limit: int):
    from torch.distributed.device_mesh import DeviceMesh

    ranks = 1
    for n in mesh:
        ranks *= n
    made = DeviceMesh("cpu", torch.arange(ranks).reshape(mesh))
    coord = made.get_coordinate()
    if coord is None:
        return None
    return tuple(coord), run_routes(mesh, tuple(coord), mesh_axes(made), limit)


def on_threads(mesh: tuple[int, ...], limit: int):
    axes = thread_axes(mesh)
    return run_threads(lambda coord: run_routes(mesh, coord, axes[coord], limit), axes)


@pytest.mark.parametrize("mesh", PROCESSES, ids=str)
def test_every_move_owns_its_adjoint_on_process_groups(pool: Pool, mesh: tuple[int, ...]) -> None:
    results = dict(filter(None, pool(on_processes, mesh, LIMIT)))
    assert check_routes(results, mesh) > 10
    threads = on_threads(mesh, LIMIT)
    for coord, found in results.items():
        for key, tensors in found.items():
            assert all(map(torch.equal, tensors, threads[coord][key])), (coord, key)


@pytest.mark.parametrize("mesh", THREADS, ids=str)
def test_every_move_owns_its_adjoint_on_threads(mesh: tuple[int, ...]) -> None:
    assert check_routes(on_threads(mesh, LIMIT), mesh) > 10
