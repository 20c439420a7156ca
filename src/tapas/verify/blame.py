"""The first operator, in program order, whose result is not that of the original; or else whose gradient is not."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import fx

from tapas.ir.graph import Op
from tapas.runtime.block import Made
from tapas.runtime.parts import shard
from tapas.sharding.layout import Layout
from tapas.verify.draws import written_block
from tapas.verify.judge import SAMPLES, distance, scale, wide
from tapas.verify.original import tensors_of
from tapas.verify.steps import Stepper, whole
from tapas.verify.threads import local_leaves, rank_at, rank_program, run_threads, thread_axes
from tapas.verify.trial import Coord, Trial

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Culprit:
    operator: str
    target: str
    module: str
    phase: str  # "forward", "backward" or "write to" a buffer
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
        inner = _Recorder(written_block(self.module, n), n.meta["first"])
        value = inner.run(*args)
        self.kept |= inner.kept
        return value


Values = Mapping[Coord, torch.Tensor]


@dataclass(frozen=True)
class Whole:
    """All tensors of the original, with their gradients."""

    values: dict[str, Any]
    parameters: dict[str, torch.Tensor]


def blame(trial: Trial) -> Culprit | None:
    """None if all is well when the ranks are threads: then it is the process groups that differ."""
    wholes = [_replay(trial), *(_replay(trial, seed) for seed in range(SAMPLES))]
    ranks = _record(trial)
    looks = (_wrong_result, _wrong_output, _wrong_gradient, _wrong_weight)
    return next((found for look in looks if (found := look(trial, wholes, ranks)) is not None), None)


def _wrong_result(trial: Trial, wholes: Sequence[Whole], ranks: "Ranks") -> Culprit | None:
    for made in _order(ranks):
        op = trial.graph.ops[made.operator]
        name = op.results[made.result]
        parts = {coord: rank.kept[made] for coord, rank in ranks.items()}
        error = _error([whole.values[name] for whole in wholes], parts, made.layout, trial.mesh.sizes)
        if error > TOLERANCE:
            return _culprit(op, "forward", made.layout, error)
    return None


def _wrong_output(trial: Trial, wholes: Sequence[Whole], ranks: "Ranks") -> Culprit | None:
    """A result that is right where it is made, and wrong where it leaves the model."""
    for number, (name, layout) in enumerate(zip(trial.graph.outputs, trial.placed.outputs, strict=True)):
        parts = {coord: rank.outputs[number] for coord, rank in ranks.items()}
        error = _error([whole.values[name] for whole in wholes], parts, layout, trial.mesh.sizes)
        if error > TOLERANCE and name in trial.graph.producers:
            return _culprit(trial.graph.producers[name], "forward", layout, error)
    return None


def _wrong_gradient(trial: Trial, wholes: Sequence[Whole], ranks: "Ranks") -> Culprit | None:
    graph = trial.graph
    for made in reversed(_order(ranks)):
        op = graph.ops[made.operator]
        name = op.results[made.result]
        if wholes[0].values[name].grad is None or not graph.readers.get(name):
            continue
        parts = {coord: _gradient(rank.kept[made]) for coord, rank in ranks.items()}
        layout = tuple(state.gradient for state in made.layout)
        error = _error([_gradient(whole.values[name]) for whole in wholes], parts, layout, trial.mesh.sizes)
        if error > TOLERANCE:
            return _culprit(graph.readers[name][-1], "backward", made.layout, error)
    return None


def _wrong_weight(trial: Trial, wholes: Sequence[Whole], ranks: "Ranks") -> Culprit | None:
    weights = wholes[0].parameters
    for op in reversed(trial.graph.ops):
        for name in op.operands:
            if name in weights and weights[name].grad is not None:
                layout = trial.placed.weights[name]
                parts = {coord: _gradient(rank.parameters[name]) for coord, rank in ranks.items()}
                references = [_gradient(whole.parameters[name]) for whole in wholes]
                error = _error(references, parts, layout, trial.mesh.sizes)
                if error > TOLERANCE:
                    return _culprit(op, "backward", layout, error)
    return None


def _order(ranks: "Ranks") -> list[Made]:
    """What operators made, in the order of the program."""
    return sorted(next(iter(ranks.values())).kept, key=lambda made: (made.operator, made.result))


def _culprit(op: Op, phase: str, layout: Layout, error: float) -> Culprit:
    return Culprit(op.name, op.target, op.module, phase, ", ".join(map(str, layout)), error)


def _gradient(x: torch.Tensor) -> torch.Tensor:
    return x.grad if x.grad is not None else torch.zeros_like(x)


def _error(references: Sequence[torch.Tensor], parts: Values, layout: Layout, mesh: tuple[int, ...]) -> float:
    """Partial sums are added up first; the first reference is the truth, the others say what rounding does to it."""
    partial = [a for a, state in enumerate(layout) if state.kind == "P"]
    reference, *shaken = [x.detach() for x in references]
    worst = 0.0
    for coord in parts:
        if any(coord[a] for a in partial):
            continue
        summed = sum(wide(parts[c]) for c in _partners(coord, partial, mesh))
        assert isinstance(summed, torch.Tensor)
        worst = max(worst, distance(summed, shard(reference, layout, mesh, coord)))
    return worst / scale(reference, shaken, TOLERANCE)


def _partners(coord: Coord, axes: Sequence[int], mesh: tuple[int, ...]) -> Iterable[Coord]:
    for place in product(*(range(mesh[a]) for a in axes)):
        where = dict(zip(axes, place, strict=True))
        yield tuple(where.get(a, i) for a, i in enumerate(coord))


def _stepper(
    trial: Trial, parameters: Mapping[str, torch.Tensor], share: Callable[[int, torch.Tensor], torch.Tensor] = whole
) -> Stepper:
    return Stepper(trial.graph, tuple, parameters, share=share)


def _replay(trial: Trial, seed: int | None = None) -> Whole:
    """Every tensor of the original, with its gradient; with a seed, off by what rounding does."""
    graph = trial.graph
    parameters = {name: trial.leaves[name].clone().requires_grad_() for name in trial.trained()}
    rounding = torch.Generator().manual_seed(seed) if seed is not None else None
    values = tensors_of(graph, trial.leaves | parameters, rounding)
    for op in graph.ops:
        for name in op.results:
            if values[name].requires_grad:
                values[name].retain_grad()
    stepper = _stepper(trial, parameters)
    stepper.backward([values[name] for name in graph.outputs], stepper.others() or stepper.planned())
    return Whole(values, parameters)


@dataclass(frozen=True)
class Recorded:
    """The same of one rank."""

    kept: Mapping[Made, torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    outputs: Sequence[torch.Tensor]


Ranks = Mapping[Coord, Recorded]


def _record(trial: Trial) -> Ranks:
    axes = thread_axes(trial.mesh.sizes)

    def work(coord: Coord) -> Recorded:
        recorder = _Recorder(rank_program(trial, rank_at(trial, coord, axes[coord])))
        arguments, parameters = local_leaves(trial, coord)
        outputs = recorder.run(*arguments)
        stepper = _stepper(trial, parameters, trial.placed.share(coord))
        stepper.backward(outputs, stepper.others() or stepper.planned())
        return Recorded(recorder.kept, parameters, outputs)

    return run_threads(work, axes)
