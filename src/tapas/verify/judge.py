"""How far the ranks are from the original."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite

import torch

from tapas.plan.assignment import output_layouts
from tapas.runtime.parts import shard
from tapas.sharding.layout import Layout
from tapas.verify.steps import Outcome
from tapas.verify.trial import Coord, Trial

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
ZERO = 1e-6  # of the whole gradient's norm: what is smaller is zero but for rounding


@dataclass(frozen=True)
class Error:
    """The worst of its kind."""

    what: str
    relative: float
    where: str = ""  # the output or weight, by its name in the model
    compared: int = 1


def distance(
    reference: torch.Tensor, parts: Mapping[Coord, torch.Tensor | None], layout: Layout, mesh: tuple[int, ...],
    least: float = 0.0,
) -> float:  # fmt: skip
    """The largest difference on any rank over the norm of the whole; inf for what is missing or has another shape."""
    norm = max(float(reference.double().norm()), least, 1e-300)
    worst = 0.0
    for coord, part in parts.items():
        wanted = shard(reference, layout, mesh, coord)
        if part is None or part.shape != wanted.shape:
            return inf
        error = float((part.double() - wanted.double()).norm()) / norm if wanted.numel() else 0.0
        worst = max(worst, error if isfinite(error) else inf)
    return worst


def judge(trial: Trial, reference: Outcome, ranks: Mapping[Coord, Outcome]) -> list[Error]:
    errors = [_outputs(trial, reference, ranks)]
    if reference.losses:
        errors += [_losses(reference, ranks), _gradients(trial, reference, ranks), _weights(trial, reference, ranks)]
    return errors


def _outputs(trial: Trial, reference: Outcome, ranks: Mapping[Coord, Outcome]) -> Error:
    errors = []
    layouts = output_layouts(trial.assignment, trial.folded)
    for i, (name, layout) in enumerate(zip(trial.graph.outputs, layouts, strict=True)):
        parts = {coord: outcome.outputs[i] for coord, outcome in ranks.items()}
        errors.append((distance(reference.outputs[i], parts, layout, trial.mesh.sizes), name))
    return _worst("outputs", errors)


def _losses(reference: Outcome, ranks: Mapping[Coord, Outcome]) -> Error:
    pairs = [(a, b) for outcome in ranks.values() for a, b in zip(outcome.losses, reference.losses, strict=True)]
    worst = max(abs(a - b) / max(abs(b), 1e-300) if isfinite(a) else inf for a, b in pairs)
    return Error("losses of all steps", worst, "", len(reference.losses))


def _worst(what: str, errors: list[tuple[float, str]]) -> Error:
    relative, where = max(errors, default=(0.0, ""))
    return Error(what, relative, where, len(errors))


def _path(trial: Trial, name: str) -> str:
    return trial.graph.leaf_of[name].paths[0]


def _gradients(trial: Trial, reference: Outcome, ranks: Mapping[Coord, Outcome]) -> Error:
    total = sum(float(g.double().norm()) ** 2 for g in reference.gradients.values()) ** 0.5
    errors, mesh = [], trial.mesh.sizes
    for name, gradient in reference.gradients.items():
        layout = trial.stored[name]
        parts = {}
        for coord, outcome in ranks.items():  # no gradient is a gradient of zeros
            part = outcome.gradients.get(name)
            parts[coord] = part if part is not None else torch.zeros_like(shard(gradient, layout, mesh, coord))
        errors.append((distance(gradient, parts, layout, mesh, ZERO * total), _path(trial, name)))
    return _worst("gradients", errors)


def _weights(trial: Trial, reference: Outcome, ranks: Mapping[Coord, Outcome]) -> Error:
    errors = []
    for name, weight in reference.weights.items():
        parts = {coord: outcome.weights.get(name) for coord, outcome in ranks.items()}
        errors.append((distance(weight, parts, trial.stored[name], trial.mesh.sizes), _path(trial, name)))
    return _worst("weights after all steps", errors)
