"""AutoParallel (meta-pytorch/autoparallel) on the model and the mesh that TAPAS plans for, where it is installed.

Written after its public interface and the example for models of transformers in its repository. It could not be
installed where this was written, so it has never been run against the real thing: whatever goes wrong in it is
reported in place of its figures, and does not end the benchmark.
"""

import importlib.util
import time
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from _timing import Clock, timed
from torch import nn

Stages = dict[str, float]  # seconds by what was done


def missing() -> str:
    """Why AutoParallel cannot be run; empty where it can."""
    if importlib.util.find_spec("autoparallel") is None:
        return "autoparallel is not installed"
    try:
        import autoparallel  # type: ignore[import-not-found]  # noqa: F401
    except Exception as error:  # it asks for nightly versions of torch, and fails in many ways on others
        return f"autoparallel cannot be imported ({type(error).__name__}: {error})"
    return ""


def stages(
    model: nn.Module, inputs: dict[str, Any], mesh: tuple[int, ...], clock: Clock = time.perf_counter
) -> Stages | str:
    """What tracing, making the program and solving it take; or what went wrong.

    As in its own example the model gets its token ids alone, so it has no loss to trace; the batch is split over
    the outermost axis, parameters over all devices, and repeated blocks are solved once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        return "there is a process group already"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=prod(mesh))  # type: ignore[attr-defined]
    try:
        return _stages(model, inputs["input_ids"], mesh, clock)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()


def _stages(model: nn.Module, ids: torch.Tensor, mesh: tuple[int, ...], clock: Clock) -> Stages:
    from autoparallel.api import AutoParallel  # type: ignore[import-not-found]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    device = "cuda" if torch.cuda.is_available() else "cpu"
    grid = init_device_mesh(device, mesh, mesh_dim_names=tuple(f"axis{i}" for i in range(len(mesh))))
    found: Stages = {}

    class Watched(AutoParallel):
        def build_model_graph(self) -> None:
            start = clock()  # within what is timed below: no place to collect garbage
            super().build_model_graph()
            found["trace"] = clock() - start

    def tokens() -> torch.Tensor:
        return torch.zeros(ids.shape, dtype=ids.dtype, device=device)

    whole = Watched(model, tokens, grid, repeated_subgraphs=True)
    entering, parallel = timed(whole.__enter__, clock)  # traces, then makes the integer program
    try:
        found["program"] = entering - found["trace"]
        parallel.add_input_constraints([(Shard(0), *[Replicate()] * (len(mesh) - 1))])
        parallel.add_parameter_memory_constraint(low=None, high=None)
        found["solve"], _ = timed(lambda: parallel.optimize_placement(verbose=False), clock)
    finally:
        whole.__exit__(None, None, None)
    return found
