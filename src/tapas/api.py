"""From a model to a module that runs in parallel: capture, plan (or take a plan's decisions), rewrite."""

import copy
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from tapas.capture import Captured, capture_program
from tapas.cost.optimizers import Optimizer
from tapas.errors import PlanError
from tapas.hardware.cluster import Cluster, MeshLike, cluster_from_dict, parse_mesh
from tapas.ir.fold import fold
from tapas.ir.graph import Graph
from tapas.ir.patterns import matches
from tapas.plan.plan import Operator, Plan, load_plan
from tapas.planner.decisions import decisions, restored
from tapas.planner.fit import search
from tapas.planner.pipeline import plan_model, pose, tp_hints, within
from tapas.planner.request import DEFAULT_CLUSTER, PairsLike, Request
from tapas.planner.solution import Solution, weight_layouts
from tapas.problem.build import build_problem
from tapas.problem.problem import KEEP, ModeVariable, OpVariable, Problem, TensorVariable, Variable, WeightVariable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tapas.verify.verification import Report

TOLERANCE = 1e-6  # relative: a plan and the model it is applied to must agree on its cost


def follow(graph: Graph, plan: Plan) -> Solution:
    """The solution that a saved plan describes, for the model it was made from."""
    mesh = parse_mesh(dict(zip(plan.mesh["names"], plan.mesh["sizes"], strict=True)))
    apart = [block.name for block in plan.blocks if block.paths]
    optimizer = Optimizer(plan.optimizer, plan.master)
    request = Request.of(mesh, cluster_from_dict(plan.cluster), optimizer=optimizer)
    problem, _ = pose(graph, request, apart=apart)
    solution = search(problem, _decided(problem, plan))
    if abs(solution.answer.cost - plan.cost) > TOLERANCE * plan.cost:
        raise _differs(f"its steps take {solution.answer.cost:.6g} s instead of {plan.cost:.6g} s")
    return solution


def _differs(fact: str) -> PlanError:
    return PlanError("plan", f"was made for another model: {fact}", "make it again for this model, batch and dtype")


def _decided(problem: Problem, plan: Plan) -> dict[tuple[int, int], np.ndarray]:
    """A plan's choices, as pins."""
    by_block: dict[str, list[Operator]] = {}
    for operator in plan.operators:
        by_block.setdefault(operator.block, []).append(operator)
    home = {path: block.name for block in plan.blocks for path in block.paths}
    modes = {block.name: block.recompute for block in plan.blocks}
    tensors = {block.name: block.tensors for block in plan.blocks}
    rows: dict[tuple[int, int], np.ndarray] = {}
    for b, part in enumerate(problem.blocks):
        first = problem.folded.copies[problem.folded.copies_of(b)[0]]
        name = home.get(first.path, part.block.name)
        operators = iter(by_block.get(name, []))
        weights = iter(first.weights)
        kept = _tensor_rows(part.variables, tensors.get(name, ()), name)
        for v, variable in enumerate(part.variables):
            if isinstance(variable, OpVariable):
                rows[b, v] = _operator_row(variable, next(operators, None))
            elif isinstance(variable, WeightVariable):
                rows[b, v] = _weight_row(variable, problem.folded.leaf_of[next(weights)].paths[0], plan.parameters)
            elif isinstance(variable, ModeVariable):
                rows[b, v] = _mode_row(variable, modes.get(name, KEEP), name)
        rows |= {(b, v): row for v, row in kept.items()}
    return rows


def _tensor_rows(
    variables: Sequence[Variable], layouts: Sequence[tuple[str, ...]], block: str
) -> dict[int, np.ndarray]:
    """Within a limit of memory the layouts of tensors need not be the fastest ones. A plan from before they were
    written down has none: then the fastest are right."""
    tensors = [(v, variable) for v, variable in enumerate(variables) if isinstance(variable, TensorVariable)]
    if not layouts:
        return {}
    if len(tensors) != len(layouts):
        raise _differs(f"{block} has {len(tensors)} tensors that are read more than once, not {len(layouts)}")
    rows = {}
    for (v, variable), layout in zip(tensors, layouts, strict=True):
        known = [tuple(map(str, variable.space.layout(int(i)))) for i in variable.allowed]
        if layout not in known:
            raise _differs(f"{variable.tensor.name} in {block} cannot be {', '.join(layout)}")
        rows[v] = np.array([known.index(layout)])
    return rows


def _operator_row(variable: OpVariable, operator: Operator | None) -> np.ndarray:
    if operator is None or operator.target != variable.op.target:
        raise _differs(f"{variable.op.module} calls {variable.op.target} where the plan has something else")
    texts = [str(option) for option in variable.table.options]
    if not set(operator.choice) <= set(texts):
        raise _differs(f"{variable.op.module} cannot do {', '.join(operator.choice)}")
    wanted = [texts.index(choice) for choice in operator.choice]
    found = np.flatnonzero((variable.table.combos == wanted).all(1))
    if not len(found):
        raise _differs(f"{variable.op.module} cannot do {', '.join(operator.choice)}")
    return found


def _mode_row(variable: ModeVariable, mode: str, block: str) -> np.ndarray:
    if mode not in variable.modes:
        raise _differs(f"{block} cannot recompute {mode}")
    return np.array([variable.modes.index(mode)])


def _weight_row(variable: WeightVariable, path: str, parameters: Mapping[str, list[str]]) -> np.ndarray:
    pattern = next((p for p in parameters if p == path or matches(path, p)), None)
    if pattern is None:
        raise _differs(f"it has no parameter {path}")
    layouts = [[str(s) for s in variable.space.layout(int(i))] for i in variable.stored]
    if parameters[pattern] not in layouts:
        raise _differs(f"{path} cannot be stored as {parameters[pattern]}")
    return np.array([layouts.index(parameters[pattern])])


def solution_for(graph: Graph, asked: Request | Plan, hints: Mapping[str, str] | None = None) -> Solution:
    """The decisions of a plan, or the best ones."""
    return follow(graph, asked) if isinstance(asked, Plan) else within(graph, asked, hints).best()


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
    if isinstance(plan, (str, Path)):
        plan = load_plan(plan)
    if not isinstance(plan, Plan):
        raise PlanError("plan", f"is a {type(plan).__name__}", "give a Plan, or the path of one")
    if given:
        fact = "the plan that is given has decided this already"
        raise PlanError(", ".join(given), fact, "leave it out; or leave out plan= to have another plan made")
    sizes = tuple(plan.mesh["sizes"])
    if mesh is not None and parse_mesh(mesh).sizes != sizes:
        planned = "x".join(map(str, sizes))
        raise PlanError(f"mesh {parse_mesh(mesh)}", f"the plan is for a mesh of {planned}", "make a plan for this mesh")
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
) -> Plan:
    """The cheapest tensor-parallel plan for a model on a cluster, with proof.

    `example_inputs` is a tuple of positional or a dict of keyword inputs (real, fake or meta tensors);
    `mesh` is a tuple such as (8, 8), a dict such as {"dp": 8, "tp": 8} or a text such as "8x8", outermost
    (slowest) axis first. A model that returns a loss is planned for training, others for inference.

    `pins` insist on a strategy or a layout, `forbid` takes a factor away: a dict of patterns, or texts such as
    "model.layers.*.mlp.*=megatron". `memory` is what a device has for the plan: bytes, a text such as "40GB", "device"
    for its own less a reserve, or None for no limit. `recompute` says whether blocks compute their activations again
    in the backward pass ("none", "selective", "block"); by default they do so where that is the fastest way to fit.
    """
    request = Request.of(
        mesh, cluster, training=training, pins=pins, forbid=forbid, batch_split=batch_split, memory=memory,
        optimizer=optimizer, recompute=recompute, baselines=baselines,
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
    in_process: bool = False,
    steps: int = 3,
    timeout: float = 120.0,
    name: str = "",
) -> "Report":
    """Does the parallel program compute what `model` computes, and send what its plan says?

    `model` and `example_inputs` are real, on the CPU; dropout is left out of what is compared. The plan is the one
    that is given (a Plan, or the path of one), or the best one for what else is given, as `tapas.plan` takes it.
    """
    from tapas.verify.verification import verify_model

    asked = _asked(
        mesh, plan, cluster=cluster, training=training, pins=pins, forbid=forbid, batch_split=batch_split,
        memory=memory, optimizer=optimizer, recompute=recompute,
    )  # fmt: skip
    return verify_model(model, example_inputs, asked, in_process=in_process, steps=steps, timeout=timeout, name=name)


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
    initialize: bool = True,
    parts: bool = False,
) -> nn.Module:
    """A module with the original parameter names, as DTensors, that every rank of `mesh` calls alike.

    `mesh` is a `torch.distributed` DeviceMesh, or sizes from which one is made (the default process group
    has to exist). All ranks give the same model and the same example inputs, of the global batch. The plan is the one
    that is given (a Plan, or the path of one), or the best one for what else is given, as `tapas.plan` takes it.
    Weights on the meta device are initialised as the model's author does it, the same on every mesh; with
    `initialize=False` they are left as they come, to be loaded. The module is called with the whole batch, or with
    DTensors; with `parts=True` each rank gives its part of the planned batch instead.
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    from tapas.runtime.module import ParallelModule

    grid = parse_mesh(tuple(mesh.shape) if isinstance(mesh, DeviceMesh) else mesh)
    asked = _asked(
        grid, plan, cluster=cluster, training=training, pins=pins, forbid=forbid, batch_split=batch_split,
        memory=memory, optimizer=optimizer, recompute=recompute,
    )  # fmt: skip
    if not isinstance(mesh, DeviceMesh):
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(kind, grid.sizes, mesh_dim_names=grid.names)
    mixed = len({t.is_meta for t in (*model.parameters(), *model.buffers())}) > 1
    skeleton = _skeleton(model)
    traced = skeleton if mixed and skeleton else model
    captured: Captured = capture_program(traced, example_inputs, training=asked.training)
    solution = solution_for(captured.graph, asked, tp_hints(model))
    again = _again(skeleton, captured.graph, solution) if skeleton else None
    return ParallelModule(model, captured, solution, mesh, again, initialize, parts)


def _skeleton(model: nn.Module) -> nn.Module | None:
    """A copy without weights, for other shapes and modes; some models cannot be copied."""
    try:
        return copy.deepcopy(model, {id(t): _on_meta(t) for t in (*model.parameters(), *model.buffers())})
    except Exception:  # whatever a model's parts do not like about it: then it runs as planned only
        return None


def _again(skeleton: nn.Module, graph: Graph, solution: Solution) -> Callable[[dict, bool], tuple[Captured, Solution]]:
    """What was decided, for inputs of other shapes and in the other mode: captured again."""
    said, router = decisions(solution), solution.problem.router

    def again(inputs: dict[str, Any], training: bool) -> tuple[Captured, Solution]:
        captured = capture_program(skeleton.train(training), inputs, training=graph.loss is not None)
        try:
            return captured, restored(fold(captured.graph), router, said, solution.problem.optimizer)
        except PlanError:  # other operations: the best plan that stores the weights as they are stored
            problem = build_problem(fold(captured.graph), router)
            return captured, search(problem, _stored(problem, solution))

    return again


def _stored(problem: Problem, solution: Solution) -> dict[tuple[int, int], np.ndarray]:
    """Every weight where it is."""
    leaf_of = solution.problem.folded.leaf_of
    layouts = {
        path: [str(s) for s in at] for name, at in weight_layouts(solution).items() for path in leaf_of[name].paths
    }
    rows: dict[tuple[int, int], np.ndarray] = {}
    for one in problem.folded.copies:
        variables = problem.blocks[one.block].variables
        stored = [(v, variable) for v, variable in enumerate(variables) if isinstance(variable, WeightVariable)]
        for (v, variable), name in zip(stored, one.weights, strict=True):
            path = problem.folded.leaf_of[name].paths[0]
            row = _weight_row(variable, path, layouts)
            if not np.array_equal(rows.setdefault((one.block, v), row), row):
                raise PlanError(path, "is stored in another way than in other layers", "plan again for these inputs")
    return rows


def _on_meta(t: Any) -> Any:
    made = t.detach().to("meta")
    return nn.Parameter(made, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else made
