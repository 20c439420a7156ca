"""From a model to a module that runs in parallel: capture, plan (or take a plan's decisions), rewrite."""

import copy
import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tapas.capture import capture_program
from tapas.cost.collectives import ClusterRouter
from tapas.cost.memory import Optimizer
from tapas.errors import PlanError, TapasError
from tapas.hardware.cluster import Cluster
from tapas.hardware.mesh import Mesh, MeshLike, parse_mesh
from tapas.ir.fold import fold
from tapas.plan.assignment import stored_by_path
from tapas.plan.plan import Plan, load_plan
from tapas.planner.assignment import ForeignPlan, adapted, assignment_of, stored_rows
from tapas.planner.fit import search
from tapas.planner.pipeline import decided, plan_model, router_of, tp_hints
from tapas.planner.request import DEFAULT_CLUSTER, PairsLike, Request
from tapas.problem.build import build_problem
from tapas.runtime.executor import Again, Compilable, Options
from tapas.runtime.module import ParallelModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tapas.export.exported import Exported
    from tapas.serving.plans import ServingPlan
    from tapas.verify.verification import Report


# A plan has decided all that these options would: whether one was given has to be told from whether it has its default.
class Unset(Enum):
    """An option that was not given."""

    DEFAULT = "default"

    def __repr__(self) -> str:
        return self.value


DEFAULT = Unset.DEFAULT


def _asked(mesh: MeshLike | None, plan: Plan | str | Path | None, **options: Any) -> Request | Plan:
    """What to run: a plan that is given, which leaves nothing to ask for, or the best one for a request."""
    given = {name: value for name, value in options.items() if value is not DEFAULT}
    if plan is None:
        return Request.of(mesh, **given)
    plan = _loaded(plan)
    if given:
        fact = "the plan that is given has decided this already"
        raise PlanError(", ".join(given), fact, "leave it out; or leave out plan= to have another plan made")
    sizes = tuple(plan.mesh["sizes"])
    if mesh is not None and parse_mesh(mesh).sizes != sizes:
        planned = "x".join(map(str, sizes))
        raise PlanError(f"mesh {parse_mesh(mesh)}", f"the plan is for a mesh of {planned}", "make a plan for this mesh")
    return plan


def _loaded(plan: Plan | str | Path) -> Plan:
    if isinstance(plan, (str, Path)):
        plan = load_plan(plan)
    if not isinstance(plan, Plan):
        raise PlanError("plan", f"is a {type(plan).__name__}", "give a Plan, or the path of one")
    return plan


def plan(
    model: nn.Module,
    example_inputs: Any,
    *,
    mesh: MeshLike,
    cluster: str | Cluster = DEFAULT_CLUSTER,
    training: bool | None = None,
    pins: PairsLike = None,
    forbid: PairsLike = None,
    batch_split: bool = True,
    baselines: bool = True,
    name: str = "",
    memory: float | str | None = "device",
    optimizer: str | Optimizer = "adam",
    recompute: str = "auto",
    losses: Sequence[str] = (),
    pieces: int = 1,
    compile: bool = False,
    accumulate: int = 1,
    time_limit: float | None = None,
    discovery: bool = True,
    capacity: float | None = None,
) -> Plan:
    """The cheapest tensor-parallel plan for a model on a cluster, with proof.

    `example_inputs` is a tuple of positional or a dict of keyword inputs (real, fake or meta tensors);
    `mesh` is a tuple such as (8, 8), a dict such as {"dp": 8, "tp": 8} or a text such as "8x8", outermost
    (slowest) axis first. A model that returns a loss is planned for training, others for inference.

    `pins` insist on a strategy or a layout, `forbid` takes a factor away: a dict of patterns, or texts such as
    "model.layers.*.mlp.*=megatron". `memory` is what a device has for the plan: bytes, a text such as "40GB", "device"
    for its own less a reserve, or None for no limit. `recompute` says whether blocks compute their activations again
    in the backward pass ("none", "selective", "block"); by default they do so where that is the fastest way to fit.

    Gradients flow through every output of the parallel module as through the model's. The plan is made for those of the
    loss; `losses` names other outputs (keys, or positions as text), and with `training=True` a model that returns no
    loss is planned for the gradients of all its outputs.

    After `time_limit` seconds the search ends with the best plan so far, which says how far from the best it may be.
    (Ranks that plan for themselves have to come to the same end: `parallelize` has no such limit.)

    With `accumulate`, a step is so many micro batches of the size of the example, and one step of the optimizer: each
    of them goes forward and backward and sends its gradients, which add up where they are stored.

    With `pieces`, products whose operand is gathered or whose result is scattered are run in so many pieces of the
    batch, some of which travel while others are computed. Prices know nothing of it: measure whether it pays.

    With `compile`, the program is to run under torch.compile, and is priced so: operators that are no products run
    together, and what they hand to each other takes neither time nor memory. `parallelize` then compiles it.

    Operators without a rule are run whole and in parts on small inputs, in a process of their own, to find how they can
    be split; with `discovery=False` they run whole. `tapas.rule` states it.

    With `capacity`, tokens that are sent to experts travel in buffers of a fixed size, with room for so many times an
    equal share, and nothing has to be read by the host. None is ever dropped: where one does not fit, all ranks fail.
    """
    request = Request.of(
        mesh, cluster, training=training, pins=pins, forbid=forbid, batch_split=batch_split, memory=memory,
        optimizer=optimizer, recompute=recompute, baselines=baselines, losses=losses, pieces=pieces,
        compile=compile, accumulate=accumulate, time_limit=time_limit, discovery=discovery, capacity=capacity,
    )  # fmt: skip
    return plan_model(model, example_inputs, request, name)


def verify(
    model: nn.Module,
    example_inputs: Any,
    *,
    mesh: MeshLike | None = None,
    plan: Plan | str | Path | None = None,
    cluster: str | Cluster | Unset = DEFAULT,
    training: bool | Unset | None = DEFAULT,
    pins: PairsLike | Unset = DEFAULT,
    forbid: PairsLike | Unset = DEFAULT,
    batch_split: bool | Unset = DEFAULT,
    memory: float | str | Unset | None = DEFAULT,
    optimizer: str | Optimizer | Unset = DEFAULT,
    recompute: str | Unset = DEFAULT,
    losses: Sequence[str] | Unset = DEFAULT,
    pieces: int | Unset = DEFAULT,
    compile: bool | Unset = DEFAULT,
    accumulate: int | Unset = DEFAULT,
    discovery: bool | Unset = DEFAULT,
    capacity: float | Unset | None = DEFAULT,
    in_process: bool = False,
    steps: int = 3,
    timeout: float = 120.0,
    name: str = "",
    trace: str | Path | None = None,
    trace_device: str = "cpu",
) -> "Report":
    """Does the parallel program compute what `model` computes, and send what its plan says?

    `model` and `example_inputs` are real, on the CPU; dropout is left out of what is compared. The plan is the one
    that is given (a Plan, or the path of one), or the best one for what else is given, as `tapas.plan` takes it. One
    for torch.compile runs without it here. With `trace`, the path of a .json or .json.gz file, one step is recorded for
    ui.perfetto.dev, on CPUs or on GPUs (`trace_device="cuda"`), and the report's `trace` says how much of what was sent
    was hidden.
    """
    from tapas.verify.trace import TraceRequest
    from tapas.verify.verification import verify_model

    recorded = TraceRequest.of(trace, trace_device, in_process)
    asked = _asked(
        mesh, plan, cluster=cluster, training=training, pins=pins, forbid=forbid, batch_split=batch_split,
        memory=memory, optimizer=optimizer, recompute=recompute, losses=losses, pieces=pieces,
        compile=compile, accumulate=accumulate, discovery=discovery, capacity=capacity,
    )  # fmt: skip
    return verify_model(
        model, example_inputs, asked, in_process=in_process, steps=steps, timeout=timeout, name=name, trace=recorded
    )


def parallelize(
    model: nn.Module,
    example_inputs: Any,
    *,
    mesh: "MeshLike | DeviceMesh",
    plan: Plan | str | Path | None = None,
    cluster: str | Cluster | Unset = DEFAULT,
    training: bool | Unset | None = DEFAULT,
    pins: PairsLike | Unset = DEFAULT,
    forbid: PairsLike | Unset = DEFAULT,
    batch_split: bool | Unset = DEFAULT,
    memory: float | str | Unset | None = DEFAULT,
    optimizer: str | Optimizer | Unset = DEFAULT,
    recompute: str | Unset = DEFAULT,
    losses: Sequence[str] | Unset = DEFAULT,
    pieces: int | Unset = DEFAULT,
    compile: bool | Unset = DEFAULT,
    accumulate: int | Unset = DEFAULT,
    discovery: bool | Unset = DEFAULT,
    capacity: float | Unset | None = DEFAULT,
    initialize: bool = True,
    parts: bool = False,
    broadcast: bool = False,
    check_inputs: bool = True,
) -> nn.Module:
    """A module with the original parameter names, as DTensors, that every rank of `mesh` calls alike.

    `mesh` is a `torch.distributed` DeviceMesh, or sizes from which one is made (the default process group
    has to exist). All ranks give the same model and the same example inputs, of the global batch. The plan is the one
    that is given (a Plan, or the path of one), or the best one for what else is given, as `tapas.plan` takes it.
    Weights on the meta device are initialised as the model's author does it, the same on every mesh; with
    `initialize=False` they are left as they come, to be loaded; other weights have to be the same on all ranks, or with
    `broadcast=True` are those of the first one. The module is called as the model is, with the whole batch, or with
    DTensors; with `parts=True` each rank gives its part of the planned batch instead. In the first steps the ranks
    compare what they are given, unless `check_inputs=False`. With `compile`, or a plan that was made so, blocks are
    compiled by torch.compile when they are first called.
    """
    from torch.distributed.device_mesh import DeviceMesh

    grid = parse_mesh(tuple(mesh.shape) if isinstance(mesh, DeviceMesh) else mesh)
    asked = _asked(
        grid, plan, cluster=cluster, training=training, pins=pins, forbid=forbid, batch_split=batch_split,
        memory=memory, optimizer=optimizer, recompute=recompute, losses=losses, pieces=pieces,
        compile=compile, accumulate=accumulate, discovery=discovery, capacity=capacity,
    )  # fmt: skip
    mesh = _started(mesh, grid)
    mixed = len({t.is_meta for t in (*model.parameters(), *model.buffers())}) > 1
    skeleton = _skeleton(model)
    traced = skeleton if mixed and skeleton is not None else model
    wanted = {"training": asked.training, "losses": asked.losses, "capacity": asked.capacity}
    captured = capture_program(traced, example_inputs, **wanted)
    folded = fold(captured.graph)
    source = Compilable(captured, folded, decided(captured.graph, folded, asked, tp_hints(model)))
    again = _again(skeleton, source, router_of(asked), asked.capacity) if skeleton is not None else None
    options = Options(initialize, parts, broadcast, check_inputs)
    parallel = ParallelModule(model, source, mesh, example_inputs, again, options)
    if asked.source.get("compile", False) if isinstance(asked, Plan) else asked.compile:
        parallel.compile()
    return parallel


def plan_serving(
    model: nn.Module,
    *,
    mesh: MeshLike,
    batch: int,
    prompt: int,
    new: int,
    cluster: str | Cluster = DEFAULT_CLUSTER,
    pins: PairsLike = None,
    forbid: PairsLike = None,
    batch_split: bool = True,
    memory: float | str | None = "device",
    baselines: bool = True,
    name: str = "",
) -> "ServingPlan":
    """The best plan to serve a transformers model that generates: `batch` prompts at a time of at most `prompt` tokens,
    each continued by at most `new`.

    Prefill and decode are two programs over one set of weights and one cache, planned together. The plan says what the
    first token takes and each one after it, and with `baselines` what plain tensor parallelism does at every degree.
    The other options are those of `tapas.plan`.
    """
    from tapas.serving.planning import plan_serving as planned
    from tapas.serving.workload import Workload

    request = Request.of(
        mesh, cluster, training=False, pins=pins, forbid=forbid, batch_split=batch_split, memory=memory,
        baselines=baselines,
    )  # fmt: skip
    return planned(model, Workload(batch, prompt, new), request, name)


def serve(
    model: nn.Module,
    *,
    mesh: "MeshLike | DeviceMesh",
    plan: "ServingPlan | str | Path | None" = None,
    batch: int | None = None,
    prompt: int | None = None,
    new: int | None = None,
    cluster: str | Cluster | Unset = DEFAULT,
    pins: PairsLike | Unset = DEFAULT,
    forbid: PairsLike | Unset = DEFAULT,
    batch_split: bool | Unset = DEFAULT,
    memory: float | str | Unset | None = DEFAULT,
    initialize: bool = True,
    broadcast: bool = False,
) -> Any:
    """A transformers model whose `generate` runs on all ranks of `mesh`, which call it alike.

    The plan is the one that is given (a ServingPlan, or the path of one that `tapas plan --serve -o` wrote), or the
    best one for `batch`, `prompt` and `new`, see `plan_serving`. `generate` takes what the original takes: greedy and
    sampling (seed all ranks alike before), prompts of unequal length with their mask, fewer and shorter ones than
    planned. Beam search, assisted decoding and all else that is not carried are refused by name. The weights are those
    of `module`, a parallel module as `parallelize` returns it, under the model's names; `initialize` and `broadcast`
    are as there.
    """
    from torch.distributed.device_mesh import DeviceMesh

    from tapas.serving.serve import planned_for, serve_model

    grid = parse_mesh(tuple(mesh.shape) if isinstance(mesh, DeviceMesh) else mesh)
    options = {
        "cluster": cluster, "pins": pins, "forbid": forbid, "batch_split": batch_split, "memory": memory,
        "batch": batch if batch is not None else DEFAULT, "prompt": prompt if prompt is not None else DEFAULT,
        "new": new if new is not None else DEFAULT,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not DEFAULT}
    chosen = planned_for(model, grid, plan, given)
    return serve_model(model, _started(mesh, grid), chosen, Options(initialize, False, broadcast, True))


def export(
    plan: Plan | str | Path,
    to: str,
    model: nn.Module | None = None,
    example_inputs: Any = None,
    *,
    approximate: bool = False,
) -> "Exported":
    """A plan (or the path of one) in the format of another tool: "transformers", "torch", "dtensor" or "jax".

    Formats that speak of modules need the model and its example inputs again, unless the plan was made by
    `tapas plan`, which writes down where its model comes from. What is returned has the file's `text`, the same as
    `data`, and `notes` about what the tool does in its own way. A plan that the format cannot express is refused with
    all reasons; with `approximate=True` the best plan that it can express is exported instead: `dropped` says what is
    missing, `seconds` what a step then takes.
    """
    from tapas.export.formats import export_plan
    from tapas.export.saying import PlannedModel
    from tapas.models.source import source_of

    planned = _loaded(plan)

    def subject() -> PlannedModel:
        if model is None:
            source, request = source_of(planned, "plan")
            return PlannedModel(planned, *source.with_graph(request.training))
        captured = capture_program(model, example_inputs, training=planned.training, losses=planned.losses)
        return PlannedModel(planned, model, example_inputs, captured.graph, tp_hints(model))

    return export_plan(planned, to, approximate, subject)


def _started(mesh: Any, grid: Mesh) -> "DeviceMesh":
    """The device mesh that is given, or a new one."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if isinstance(mesh, DeviceMesh):
        return mesh
    _check_started(grid)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(kind, grid.sizes, mesh_dim_names=grid.names)


def _check_started(grid: Mesh) -> None:
    import torch.distributed as dist

    if not dist.is_initialized() and "RANK" not in os.environ:
        raise TapasError(
            f"mesh {grid}", "this process runs alone: torchrun did not start it, and it has no process group",
            f"start the script with torchrun --nproc-per-node {grid.devices} script.py",
        )  # fmt: skip


def _skeleton(model: nn.Module) -> nn.Module | None:
    """A copy without weights, for other shapes and modes; some models cannot be copied."""
    try:
        return copy.deepcopy(model, {id(t): _on_meta(t) for t in (*model.parameters(), *model.buffers())})
    except Exception:  # whatever a model's parts do not like about it: then it runs as planned only
        return None


def _again(skeleton: nn.Module, source: Compilable, router: ClusterRouter, capacity: float | None) -> Again:
    """What was decided, for inputs of other shapes and in the other mode: captured again."""
    wanted = {"training": source.captured.graph.training, "losses": source.captured.losses, "capacity": capacity}

    def compilable(model: nn.Module, inputs: Any) -> Compilable:
        captured = capture_program(model, inputs, **wanted)
        folded = fold(captured.graph)
        try:
            return Compilable(captured, folded, adapted(source.assignment, folded))
        except ForeignPlan:  # the other mode has other operations: the best plan that stores the weights as they are
            problem = build_problem(folded, router)
            rows = stored_rows(problem, stored_by_path(source.assignment, source.folded))
            return Compilable(captured, folded, assignment_of(search(problem, rows), source.assignment.pieces))

    return Again(skeleton, compilable)


def _on_meta(t: Any) -> Any:
    made = t.detach().to("meta")
    return nn.Parameter(made, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else made
