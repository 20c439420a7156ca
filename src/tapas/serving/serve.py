"""From a model to one that generates on all ranks of a mesh."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tapas.errors import PlanError, TapasError
from tapas.hardware.mesh import Mesh
from tapas.ir.fold import fold
from tapas.plan.assignment import resident_layouts, weight_layouts
from tapas.plan.plan import mesh_of
from tapas.planner.assignment import followed
from tapas.planner.request import Request
from tapas.runtime.executor import Again, Compilable, Options
from tapas.runtime.module import ParallelModule
from tapas.serving.generation import served_model
from tapas.serving.planning import captured_phases, plan_serving
from tapas.serving.plans import ServingPlan, load_serving_plan
from tapas.serving.static_cache import is_cache
from tapas.serving.step import GenerationStep, generation_step
from tapas.serving.workload import LEAST, Workload

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def planned_for(model: Any, mesh: Mesh, plan: Any, given: dict[str, Any]) -> ServingPlan:
    """The plan that is given, which has decided all that the options would; or the best one for these."""
    if plan is None:
        missing = [name for name in LEAST if name not in given]
        if missing:
            remedy = "say how many prompts, of how many tokens, continued by how many: batch=, prompt=, new="
            raise TapasError(", ".join(missing), "is not given, and neither is a plan", remedy)
        workload = Workload(*(given.pop(name) for name in LEAST))
        return plan_serving(model, workload, Request.of(mesh, training=False, baselines=False, **given))
    if given:
        fact = "the plan that is given has decided this already"
        raise PlanError(", ".join(given), fact, "leave it out; or leave out plan= to have another plan made")
    if isinstance(plan, (str, Path)):
        plan = load_serving_plan(plan)
    if not isinstance(plan, ServingPlan):
        remedy = "give what tapas.plan_serving returns, or the path of what `tapas plan --serve -o` wrote"
        raise PlanError("plan", f"is a {type(plan).__name__}", remedy)
    return plan


def serve_model(model: Any, device_mesh: "DeviceMesh", plan: ServingPlan, options: Options) -> Any:
    """The model as `plan` splits it."""
    if tuple(device_mesh.shape) != mesh_of(plan.prefill).sizes:
        raise PlanError(
            f"mesh {tuple(device_mesh.shape)}", f"the plan is for {mesh_of(plan.prefill)}", "plan for this mesh"
        )
    step = generation_step(model, plan.workload)
    prefill, decode = (
        Compilable(captured, folded := fold(captured.graph), followed(phase, captured.graph, folded))
        for captured, phase in zip(captured_phases(step), (plan.prefill, plan.decode), strict=True)
    )
    check_alike(prefill, decode)

    def program(skeleton: nn.Module, inputs: Any) -> Compilable:
        """Of the other phase: nothing else is planned."""
        if not skeleton.training and tuple(inputs["input_ids"].shape) == (plan.workload.batch, 1):
            return decode
        raise TapasError(
            type(model).__name__, f"the plan is for {plan.workload}", "call generate(), in evaluation mode"
        )

    again = Again(_without_weights(step), program)
    # the prefill reads all that a decode step reads
    module = ParallelModule(step, prefill, device_mesh, step.inputs(decode=False), again, options)
    return served_model(model, module, plan.workload)


def check_alike(prefill: Compilable, decode: Compilable) -> None:
    """Weights and caches are held once: both programs have to find them so. The prefill reads all of them."""
    held, found = (
        weight_layouts(s.assignment, s.folded) | resident_layouts(s.assignment, s.folded) for s in (prefill, decode)
    )
    for name, layout in found.items():
        if held.get(name) != layout:
            raise PlanError(
                name, "is held differently by the two plans", "make the plan again with `tapas plan --serve`"
            )
    for source in (prefill, decode):
        caches = {leaf.tensor for leaf in source.captured.graph.leaves if leaf.paths and is_cache(leaf.paths[0])}
        if missing := caches - resident_layouts(source.assignment, source.folded).keys():
            raise TapasError(
                min(missing), "is read by other operators than those of a cache", "please report the model"
            )


def _without_weights(step: GenerationStep) -> nn.Module:
    on_meta: dict[int, Any] = {id(t): t.detach().to("meta") for t in step.buffers()}
    on_meta |= {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in step.parameters()}
    return copy.deepcopy(step, on_meta)
