"""Run a captured graph as it is: the proof that capture kept the meaning, and the base of the runtime."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, cast

import torch

from tapas.ir.custom_functions import TARGET, apply_function
from tapas.ir.graph import Graph, Op, Ref
from tapas.ir.regions import REGION, apply_region

_OURS: dict[str, Callable[..., Any]] = {TARGET: apply_function, REGION: apply_region}  # code of the model's own


@cache
def resolve(target: str) -> Callable[..., Any]:
    """The operator named `aten.linear.default`; for code of the user's own, what runs that."""
    if target in _OURS:
        return _OURS[target]
    if target.startswith("tapas."):
        # registers our own operators, in words that torch.compile reads as well
        import tapas.ir.custom_ops  # noqa: F401  # pyright: ignore[reportUnusedImport]
    operator: Any = torch.ops
    for part in target.split("."):
        operator = getattr(operator, part)
    return operator


@cache
def callee(target: str) -> Callable[..., Any]:
    """What a program calls for an operator: of those of our own that are made of torch's, the function itself."""
    operator = resolve(target)
    if target.startswith("tapas."):
        return import_module("tapas.ir.custom_ops").COMPOSITES.get(target, operator)
    return operator


@cache
def returns_list(target: str) -> bool:
    """Whether an operator returns a list, be it of one tensor."""
    if target in _OURS:
        return True
    returned = cast(Any, resolve(target))._schema.returns
    return len(returned) == 1 and returned[0].type.kind() == "ListType"


def call(op: Op, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """The results of one operator on the values of its operands."""
    function = resolve(op.target)
    operands = [values[name] for name in op.operands]
    args, kwargs = arguments(op.args, op.kwargs, operands)
    results = function(*args, **kwargs)
    return tuple(cast(list[Any], results)) if isinstance(results, (list, tuple)) else (results,)


def argument(value: Any, operands: Sequence[Any]) -> Any:
    """An argument as torch takes it: operands for Refs, lists for tuples, dtypes for their names."""
    if isinstance(value, Ref):
        return operands[value.index]
    if isinstance(value, tuple):
        return [argument(item, operands) for item in cast(tuple[Any, ...], value)]
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


def arguments(
    args: Sequence[Any], kwargs: Sequence[tuple[str, Any]], operands: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same for all arguments of a call."""
    return tuple(argument(value, operands) for value in args), {k: argument(v, operands) for k, v in kwargs}


def tensor_values(graph: Graph, leaves: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Every tensor, given the values of all leaves that the prelude does not make."""
    values: dict[str, Any] = dict(leaves)
    with torch.no_grad():
        for op in graph.prelude:
            values.update(zip(op.results, call(op, values), strict=True))
    for op in graph.ops:
        # What has no gradient in the graph must not get one here either.
        with torch.set_grad_enabled(any(graph.tensors[name].differentiable for name in op.results)):
            values.update(zip(op.results, call(op, values), strict=True))
    return values


def run(graph: Graph, leaves: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs, given the same."""
    values = tensor_values(graph, leaves)
    return tuple(values[name] for name in graph.outputs)


def leaf_values(graph: Graph, model: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Values of parameters and buffers by path, and of inputs by name."""
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    values: dict[str, torch.Tensor] = {}
    for leaf in graph.leaves:
        if leaf.kind in ("parameter", "buffer"):
            values[leaf.tensor] = state[leaf.paths[0]]
        elif leaf.kind == "input":
            values[leaf.tensor] = inputs[leaf.paths[0]]
    return values
