"""AutoParallel (meta-pytorch/autoparallel), from a checkout of its sources, on a model and a mesh that TAPAS plans for.

It is meant for nightly builds of torch and for a machine with GPUs. What stock torch without a GPU lacks is put in
place at run time (`on_stock_torch`), none of it in its own code: the checkout stays as it is. Its dependency is PuLP:
`pip install -c constraints.txt pulp`.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tapas.capture.eager_behaviour import as_in_eager
from tapas.models.load import load

VARIABLE = "TAPAS_AUTOPARALLEL"  # names the checkout where no option does
GPU, PER_NODE = "H100", 8  # what our preset h100-sxm describes
Seconds = tuple[float, float]  # wall, processor (with child processes: the solver is one)


@dataclass(frozen=True, slots=True)
class Searched:
    """What AutoParallel did: seconds by stage, and what its solver chose."""

    seconds: dict[str, Seconds]
    variables: int  # of its integer program
    objective: float  # microseconds, by its own prices
    weights: dict[str, list[str]]  # parameter -> placements
    results: dict[str, list[str]]  # module of a matmul or an embedding -> placements of its result


def missing(checkout: str) -> str:
    """Why AutoParallel cannot be run; empty where it can."""
    if not checkout:
        return f"no checkout was named (--autoparallel PATH, or {VARIABLE})"
    if not (Path(checkout) / "autoparallel" / "api.py").is_file():
        return f"{checkout} is no checkout of meta-pytorch/autoparallel"
    try:
        import pulp  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        return "PuLP, which it solves with, is not installed (pip install -c constraints.txt pulp)"
    return ""


def commit(checkout: str) -> str:
    """Which sources these are, with their date."""
    command = ["git", "-C", checkout, "log", "-1", "--format=%h, %cs"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or "unknown"


def search(checkout: str, model: str, settings: dict[str, str], mesh: tuple[int, ...]) -> Searched:
    """In a process of its own: AutoParallel keeps caches, and changes torch. As in its example for models of
    transformers, the model gets its token ids alone and so has no loss to trace; the batch is split over the outermost
    axis, parameters are over all devices, and repeated blocks are solved once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sys.path.insert(0, checkout)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=prod(mesh))  # type: ignore[attr-defined]
    loaded = load(model, settings=settings)
    assert isinstance(loaded.inputs, dict)
    try:
        with on_stock_torch(), as_in_eager(loaded.model, loaded.inputs):
            return _search(loaded.model, loaded.inputs["input_ids"], mesh)
    finally:
        dist.destroy_process_group()


def now() -> Seconds:
    return time.perf_counter(), sum(os.times()[:4])


def since(start: Seconds) -> Seconds:
    wall, processor = now()
    return wall - start[0], processor - start[1]


def _search(model: torch.nn.Module, ids: torch.Tensor, mesh: tuple[int, ...]) -> Searched:
    from autoparallel import api  # type: ignore[import-not-found]
    from autoparallel.cost_models.nccl_cost_model import h100_topo_config  # type: ignore[import-not-found]

    grid = init_device_mesh("cpu", mesh, mesh_dim_names=tuple(f"axis{i}" for i in range(len(mesh))))
    devices = prod(mesh)
    topology = h100_topo_config(max(devices // PER_NODE, 1), min(devices, PER_NODE))
    seconds: dict[str, Seconds] = {}

    class Watched(api.AutoParallel):
        def build_model_graph(self) -> None:
            start = now()
            super().build_model_graph()
            seconds["trace"] = since(start)

    def tokens() -> torch.Tensor:
        return torch.zeros(ids.shape, dtype=ids.dtype, device="cpu")

    start = now()
    with Watched(model, tokens, grid, repeated_subgraphs=True, cost_model=topology) as parallel:
        entering = since(start)  # traces, then makes the integer program
        seconds["program"] = entering[0] - seconds["trace"][0], entering[1] - seconds["trace"][1]
        start = now()
        parallel.add_input_constraints([(Shard(0), *[Replicate()] * (len(mesh) - 1))])
        parallel.add_parameter_memory_constraint(low=None, high=None)
        chosen = parallel.optimize_placement(verbose=False)
        seconds["solve"] = since(start)
        optimizer = parallel.sharding_optimizer
        variables, objective = len(optimizer.pulp_variables), float(optimizer.prob.objective.value())
        return Searched(seconds, variables, objective, *_layouts(parallel.gm.graph, chosen))


def _layouts(graph: Any, chosen: dict[Any, Any]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """How parameters are stored, and how the results of matmuls and embeddings of the forward pass are split."""
    from torch._functorch._aot_autograd.fx_utils import get_named_param_nodes

    weights = {name: _texts(chosen[node]) for name, node in get_named_param_nodes(graph).items()}
    aten, results = torch.ops.aten, {}
    products = (aten.einsum.default, aten.mm.default, aten.embedding.default)
    for node in graph.nodes:
        modules = list(node.meta.get("nn_module_stack", {}).values())
        if node.target in products and node.meta.get("partitioner_tag") == "is_forward" and modules:
            results[modules[-1][0].removeprefix("L['self'].")] = _texts(chosen[node])
    return weights, results


def _texts(strategy: Any) -> list[str]:
    return [repr(placement) for placement in strategy.output_specs.placements]


@contextmanager
def on_stock_torch() -> Iterator[None]:
    """What it needs and stock torch without a GPU has not.

    - It asks the device for its name to look up speeds: here it is told the one that TAPAS plans for.
    - On a CPU, attention is an operator that DTensor has no sharding for, which AutoParallel would then run whole on
      every device; and its operations are not counted. Both are said here, the same as torch says them of the
      operators of GPUs: split by batch or by heads, or whole.
    """
    from autoparallel.cost_models import compute_estimation  # type: ignore[import-not-found]
    from torch.distributed.tensor.experimental import register_sharding
    from torch.utils import flop_counter

    ahead = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    states = Replicate(), Shard(0), Shard(1)

    def splits(tensors: int, results: int) -> Any:
        return lambda *args, **_: [([s] * results, [s] * tensors + [None] * (len(args) - tensors)) for s in states]

    register_sharding(ahead.default)(splits(3, 2))
    register_sharding(back.default)(splits(6, 3))
    known, gpus = flop_counter.flop_registry, torch.ops.aten
    counted = {
        ahead: known[gpus._scaled_dot_product_flash_attention],
        back: known[gpus._scaled_dot_product_flash_attention_backward],
    }
    limits = next(each for each in compute_estimation.DEVICE_LIMITS if each.name == GPU)
    with (
        mock.patch.object(compute_estimation, "_get_device_limit", lambda: limits),
        mock.patch.dict(known, counted),
    ):
        yield
