"""The original: the captured graph run on one device, and the module itself."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tapas._torch import pytree
from tapas.capture.calls import Value
from tapas.errors import CaptureError, TapasError
from tapas.ir.graph import Graph, Op
from tapas.ir.interpreter import call
from tapas.verify.draws import SameDraws
from tapas.verify.steps import Outcome, Stepper, take_steps
from tapas.verify.subject import Subject


class _Rounded(torch.autograd.Function):
    """Values and gradients that are off in their last bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        ctx.generator = generator
        return _shaken(x, generator)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _shaken(gradient, ctx.generator), None


def _shaken(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Smaller by up to three units in the last place: nothing overflows. Whole numbers are exact: masks, counts."""
    if x.is_sparse or not (x.is_floating_point() or x.is_complex()):
        return x
    if x.is_complex():
        return torch.view_as_complex(_shaken(torch.view_as_real(x.resolve_conj()), generator))
    units = torch.randint(0, 4, x.shape, generator=generator).to(x.dtype)
    return torch.where(x == x.round(), x, x * (1 - torch.finfo(x.dtype).eps * units))


def tensors_of(
    graph: Graph, leaves: Mapping[str, torch.Tensor], rounding: torch.Generator | None = None
) -> dict[str, Any]:
    """Every tensor; `rounding`: each result is off in its last bits, as any other order of adding up would have it."""
    values: dict[str, Any] = dict(leaves)
    with SameDraws():
        with torch.no_grad():
            for op in graph.prelude:
                values.update(zip(op.results, _called(op, values), strict=True))
        for op in graph.ops:
            # What has no gradient in the graph must not get one here either.
            with torch.set_grad_enabled(any(graph.tensors[name].differentiable for name in op.results)):
                results: Sequence[Any] = _called(op, values)
                if rounding is not None:
                    results = [_Rounded.apply(x, rounding) for x in results]
                values.update(zip(op.results, results, strict=True))
    return values


def _called(op: Op, values: Mapping[str, Any]) -> Sequence[Any]:
    try:
        return call(op, values)
    except Exception as error:  # what a module does in place may have no form that torch can run, or differentiate
        place = op.module or op.name
        words = " ".join(str(error).split())[:200]
        raise TapasError(
            f"{place} ({op.source})" if op.source else place, f"{op.target} cannot be run: {words}",
            "write this with other operators, such as torch.cat in place of writing to a slice",
        ) from error  # fmt: skip


def replayed(graph: Graph, leaves: Mapping[str, torch.Tensor], steps: int, seed: int | None = None) -> Outcome:
    """The captured graph as it is, on one device; with a seed, off by what rounding does."""
    rounding = torch.Generator().manual_seed(seed) if seed is not None else None
    parameters = {leaf.tensor: leaves[leaf.tensor].detach().clone().requires_grad_() for leaf in graph.trained()}
    values = {**leaves, **parameters}

    def forward() -> Sequence[torch.Tensor]:
        tensors = tensors_of(graph, values, rounding)
        values.update((buffer, tensors[name].detach()) for buffer, name in graph.writes)
        return [tensors[name] for name in graph.outputs]

    def buffers() -> dict[str, torch.Tensor]:
        return {buffer: values[buffer] for buffer, _ in graph.writes}

    return take_steps(Stepper(graph, forward, parameters, buffers), steps)


def run_module(subject: Subject, steps: int) -> Outcome:
    """The module itself, in the precision that it has."""
    graph, model = subject.graph, _copied(subject.model)
    _as_captured(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def forward() -> list[torch.Tensor]:
        args, kwargs = copy.deepcopy(subject.call)  # it may write to them
        returned = _returned(subject, model(*args, **kwargs))
        written = written_buffers()
        return [*(returned[name] for name in graph.returned), *(written[buffer].clone() for buffer, _ in graph.writes)]

    def written_buffers() -> dict[str, torch.Tensor]:
        now = dict(model.named_buffers(remove_duplicate=False))
        return {buffer: now[graph.leaf_of[buffer].paths[0]] for buffer, _ in graph.writes}

    trained = {leaf.tensor: parameters[leaf.paths[0]] for leaf in graph.trained()}
    try:
        with SameDraws():  # also in the backward pass, where checkpoints draw again
            return take_steps(Stepper(graph, forward, trained, written_buffers), steps)
    except TapasError:
        raise
    except Exception as error:  # a model may raise anything
        words = " ".join(str(error).split())[:300]
        raise TapasError(
            graph.name, f"the model itself fails: {type(error).__name__}: {words}", "train it on one device first"
        ) from error


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # whatever its parts do not like about it
        fact = f"it cannot be copied: {' '.join(str(error).split())[:200]}"
        raise TapasError(
            type(model).__name__, fact, "let it hold parameters and buffers, no results of forward"
        ) from error


def _as_captured(model: nn.Module) -> None:
    """What capture leaves out of a model of transformers: a cache, and layers that are left out by chance."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    nested = [part for c in configs.values() if hasattr(c, "__dict__") for part in vars(c).values()]
    for holder in (*model.modules(), *configs.values(), *nested):
        fields = vars(holder) if hasattr(holder, "__dict__") else {}
        if type(fields.get("layerdrop")) in (int, float):
            fields["layerdrop"] = 0.0
        if type(holder).__name__.endswith("Config") and getattr(holder, "use_cache", False):
            setattr(holder, "use_cache", False)  # noqa: B010 - of a class that nobody here knows


def _returned(subject: Subject, made: Any) -> dict[str, torch.Tensor]:
    """What the model returned, by the names of the graph's outputs."""
    flat, values = pytree.tree_leaves(made), subject.captured.output_values
    if len(flat) != len(values):
        raise CaptureError(
            type(subject.model).__name__,
            f"it returns {len(flat)} values where {len(values)} were captured",
            "let it return the same in every call",
        )
    return {v.name: x for v, x in zip(values, flat, strict=True) if isinstance(v, Value)}
