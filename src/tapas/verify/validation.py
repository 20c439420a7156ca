"""Planned against measured: rank 0's program on one device, with collectives that send nothing."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tapas.cost.memory import FULL
from tapas.errors import CaptureError, PlanError, TapasError
from tapas.ir.graph import ITEMSIZE, Graph
from tapas.models.source import ModelSource
from tapas.plan.plan import Plan
from tapas.planner.assignment import assignment_of
from tapas.planner.few_runs import best_with_fewest_runs
from tapas.planner.pipeline import decided, tp_hints, within
from tapas.planner.request import Request
from tapas.planner.solution import Solution
from tapas.problem.problem import OpVariable
from tapas.rules.base import Call, repeated, rule_for
from tapas.util import Progress, silent
from tapas.verify.alone import AloneStep, step_alone
from tapas.verify.homes import homes_of
from tapas.verify.subject import capture_subject, with_weights
from tapas.verify.timeline import Timeline
from tapas.verify.trial import Trial

DEVICES = ("cpu", "cuda")
PACKING = "copies of the runtime"


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds, or bytes."""

    name: str
    planned: float
    measured: float


@dataclass(frozen=True)
class Validation:
    model: str
    mesh: str
    device: str
    cluster: str
    passes: Row  # forward and backward without what is sent
    update: Row
    memory: Row
    families: tuple[Row, ...]
    places: tuple[Row, ...]
    copied: bool  # the plan counts copies of narrow weights in float32, which the optimizer that was run has not

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_device(device: str) -> None:
    if device not in DEVICES:
        raise TapasError(f"--device {device}", "is not known", f"use one of {', '.join(DEVICES)}")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise TapasError("--device cuda", "there is none here", "leave it out to measure on CPUs")


def validate_source(
    source: ModelSource, request: Request, plan: Plan | None, device: str, rounds: int, progress: Progress = silent
) -> Validation:
    check_device(device)
    progress("load")
    loaded = source.load(request.training, device="cpu")
    model = with_weights(loaded.model)
    progress("capture")
    try:
        subject = capture_subject(model, loaded.inputs, request.training, source.model, capacity=request.capacity)
    except CaptureError as error:
        raise source.blamed(error) from error
    hints = tp_hints(model)
    limits = within(subject.graph, request, hints, progress)
    progress("search")
    solution = best_with_fewest_runs(limits).solution
    assignment = assignment_of(solution, request.pieces)
    if plan is not None and assignment != decided(subject.graph, subject.folded, plan, hints):
        raise PlanError(source.model, "at today's prices this is not the plan that is found", "plan it again")
    homes = homes_of(subject.model, subject.graph)
    trial = Trial(subject.graph, subject.folded, request.mesh, assignment, subject.leaves(), 1, homes)
    progress("run rank 0")
    return compared(solution, step_alone(trial, device, rounds), trial, device)


def compared(solution: Solution, found: AloneStep, trial: Trial, device: str) -> Validation:
    seconds, optimizer = solution.seconds(), solution.problem.optimizer
    widths = {ITEMSIZE[trial.graph.tensors[leaf.tensor].dtype] for leaf in trial.graph.trained()}
    copied = optimizer.master and any(width < FULL for width in widths)
    families, places = planned(solution)
    took, where = measured(found.timeline, trial.graph)
    return Validation(
        trial.graph.name, str(trial.mesh), device, solution.problem.router.cluster.name,
        Row("forward and backward", seconds["forward"] + seconds["backward"] + seconds["again"], found.passes),
        Row("optimizer", seconds["update"], found.update),
        Row("memory", sum(solution.memory().values()), found.peak_nbytes),
        rows(families, took), rows(places, where), copied,
    )  # fmt: skip


def rows(ours: Mapping[str, float], theirs: Mapping[str, float]) -> tuple[Row, ...]:
    names = sorted({*ours, *theirs}, key=lambda name: -max(ours.get(name, 0.0), theirs.get(name, 0.0)))
    return tuple(Row(name, ours.get(name, 0.0), theirs.get(name, 0.0)) for name in names)


def planned(solution: Solution) -> tuple[defaultdict[str, float], defaultdict[str, float]]:
    """Seconds of operators, by family and by place."""
    families, places = defaultdict[str, float](float), defaultdict[str, float](float)
    for group in solution.groups():
        mode = solution.mode(group)
        for variable, choice in zip(solution.part(group).variables, group.choices, strict=False):
            if isinstance(variable, OpVariable) and not variable.rule.view:
                table = variable.table
                seconds = float(table.forward_seconds[choice] + table.backward_seconds[choice])
                seconds += float(table.again_seconds[choice]) if repeated(mode, variable.rule) else 0.0
                families[variable.rule.kernels_of] += seconds * len(group.copies)
                places[place(variable.op.module)] += seconds * len(group.copies)
    return families, places


def measured(lanes: Timeline, graph: Graph) -> tuple[defaultdict[str, float], defaultdict[str, float]]:
    """The same of what was recorded: on CPUs of the host, on GPUs of kernels."""
    families, places = defaultdict[str, float](float), defaultdict[str, float](float)
    known: dict[str, str] = {}
    named = {op.name: op for op in graph.ops}
    on_streams = any(span.lane.startswith("stream") for span in lanes.spans)
    for span in lanes.spans:
        if span.category not in ("operator", "runtime") or on_streams != span.lane.startswith("stream"):
            continue
        op = named.get(span.details.get("operator", ""))
        if op is None and span.category == "operator":
            continue  # the optimizer
        seconds, family = (span.end - span.start) / 1e9, PACKING
        if op is not None and span.category == "operator":
            if op.name not in known:
                known[op.name] = rule_for(Call.of(op, graph.tensors)).kernels_of
            family = known[op.name]
        families[family] += seconds
        places[place(op.module) if op is not None else PACKING] += seconds
    return families, places


def place(module: str) -> str:
    """Modules by their container: `model.layers.3.mlp` is in `model.layers.*`."""
    first, number, _ = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module).partition("*")
    return first + number if number else ".".join(module.split(".")[:2]) or "model"
