"""The first operator, in program order, whose result is not that of the original; or else whose gradient is not."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import fx

from tapas.ir.graph import Op
from tapas.ir.interpreter import tensor_values
from tapas.runtime.block import Made
from tapas.runtime.parts import shard
from tapas.runtime.program import write_program
from tapas.sharding.layout import Layout
from tapas.verify.threads import local_leaves, rank_at, run_threads, thread_axes
from tapas.verify.trial import Coord, Trial

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Culprit:
    operator: str
    target: str
    module: str
    phase: str  # "forward" or "backward"
    layout: str
    error: float


class _Recorder(fx.Interpreter):
    """Keeps what operators made, with a gradient. They are numbered through all copies: `first` is the first."""

    def __init__(self, program: fx.GraphModule, first: int = 0) -> None:
        super().__init__(program)
        self.first = first
        self.kept: dict[Made, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        if "first" in n.meta:
            return self.run_copy(n)
        value = super().run_node(n)
        made = n.meta.get("made")
        if made is not None:
            if value.requires_grad:
                value.retain_grad()
            self.kept[replace(made, operator=self.first + made.operator)] = value
        return value

    def run_copy(self, n: fx.Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(n)
        inner = _Recorder(self.fetch_attr(str(n.target)), n.meta["first"])
        value = inner.run(*args)
        self.kept |= inner.kept
        return value


Values = Mapping[Coord, torch.Tensor]


def blame(trial: Trial) -> Culprit | None:
    """None if all is well when the ranks are threads: then it is the process groups that differ."""
    mesh = trial.mesh.sizes
    graph = trial.graph
    whole, weights = _replay(trial)
    ranks = _record(trial)
    kept = {coord: recorder.kept for coord, (recorder, _) in ranks.items()}
    order = sorted(next(iter(kept.values())), key=lambda made: (made.operator, made.result))
    for made in order:
        op = graph.ops[made.operator]
        error = _error(whole[op.results[made.result]], {c: k[made] for c, k in kept.items()}, made.layout, mesh)
        if error > TOLERANCE:
            return _culprit(op, "forward", made.layout, error)
    if graph.loss is None:
        return None
    for made in reversed(order):
        op = graph.ops[made.operator]
        name = op.results[made.result]
        if (reference := whole[name].grad) is not None and graph.readers.get(name):
            parts = {c: _gradient(k[made]) for c, k in kept.items()}
            layout = tuple(state.gradient for state in made.layout)
            error = _error(reference, parts, layout, mesh)
            if error > TOLERANCE:
                return _culprit(graph.readers[name][-1], "backward", made.layout, error)
    return _wrong_weight(trial, weights, {c: parameters for c, (_, parameters) in ranks.items()}, mesh)


def _wrong_weight(
    trial: Trial, weights: Mapping[str, torch.Tensor], parts: Mapping[Coord, Mapping[str, torch.Tensor]],
    mesh: tuple[int, ...],
) -> Culprit | None:  # fmt: skip
    for op in reversed(trial.graph.ops):
        for name in op.operands:
            if name in weights and (reference := weights[name].grad) is not None:
                layout = trial.stored[name]
                error = _error(reference, {c: _gradient(p[name]) for c, p in parts.items()}, layout, mesh)
                if error > TOLERANCE:
                    return _culprit(op, "backward", layout, error)
    return None


def _culprit(op: Op, phase: str, layout: Layout, error: float) -> Culprit:
    return Culprit(op.name, op.target, op.module, phase, ", ".join(map(str, layout)), error)


def _gradient(x: torch.Tensor) -> torch.Tensor:
    return x.grad if x.grad is not None else torch.zeros_like(x)


def _error(reference: torch.Tensor, parts: Values, layout: Layout, mesh: tuple[int, ...]) -> float:
    """Partial sums are added up first; the zero of a gradient is what is small beside its size."""
    partial = [a for a, state in enumerate(layout) if state.kind == "P"]
    reference = reference.detach()
    scale = max(float(reference.double().norm()), 1e-6 * prod(reference.shape) ** 0.5)
    worst = 0.0
    for coord in parts:
        if any(coord[a] for a in partial):
            continue
        summed = sum(parts[c].detach().double() for c in _partners(coord, partial, mesh))
        wanted = shard(reference, layout, mesh, coord).double()
        assert isinstance(summed, torch.Tensor)
        if summed.shape != wanted.shape or not bool(torch.isfinite(summed[torch.isfinite(wanted)]).all()):
            return float("inf")
        difference = (summed - wanted)[torch.isfinite(wanted)]  # masks hold -inf
        worst = max(worst, float(difference.norm()) / scale)
    return worst


def _partners(coord: Coord, axes: Sequence[int], mesh: tuple[int, ...]) -> Iterable[Coord]:
    for place in product(*(range(mesh[a]) for a in axes)):
        where = dict(zip(axes, place, strict=True))
        yield tuple(where.get(a, i) for a, i in enumerate(coord))


def _replay(trial: Trial) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Every tensor of the original, with its gradient."""
    graph = trial.graph
    parameters = {name: trial.leaves[name].clone().requires_grad_() for name in trial.trained()}
    values = tensor_values(graph, trial.leaves | parameters)
    for op in graph.ops:
        for name in op.results:
            if values[name].requires_grad:
                values[name].retain_grad()
    if graph.loss is not None:
        values[graph.loss].backward()
    return values, parameters


def _record(trial: Trial) -> dict[Coord, tuple[_Recorder, dict[str, torch.Tensor]]]:
    axes = thread_axes(trial.mesh.sizes)
    loss = trial.graph.loss_position

    def work(coord: Coord) -> tuple[_Recorder, dict[str, torch.Tensor]]:
        rank = rank_at(trial, coord, axes[coord])
        recorder = _Recorder(write_program(trial.graph, trial.folded, trial.assignment, rank))
        arguments, parameters = local_leaves(trial, coord)
        outputs = recorder.run(*arguments)
        if loss is not None:
            outputs[loss].backward()
        return recorder, parameters

    return run_threads(work, axes)
