"""The same graph, and the same decisions, in another precision.

A plan made in bfloat16 is checked in float64 and float32: every cast in the graph stays where it is, but to
the wider type, so that what is left of a difference is a mistake and not rounding.
"""

from dataclasses import replace
from typing import Any

import torch

from tapas.ir.fold import Folded
from tapas.ir.graph import Graph, Op, Tensors

_NARROW = ("float16", "bfloat16", "float32", "float64")  # by width
_COMPLEX = {"float64": "complex128"}


def lifted_name(dtype: str, floor: str) -> str:
    """A dtype's name at least as wide as `floor`; integers stay."""
    if dtype in _NARROW:
        wide = max(_NARROW.index(dtype), _NARROW.index(floor))
        return _NARROW[wide]
    return _COMPLEX.get(floor, dtype) if dtype.startswith("complex") else dtype


def lifted_value(value: torch.Tensor, floor: str) -> torch.Tensor:
    name = str(value.dtype).removeprefix("torch.")
    return value.detach().to(getattr(torch, lifted_name(name, floor)))


def _argument(value: Any, floor: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_argument(item, floor) for item in value)
    if isinstance(value, str) and value.startswith("torch."):
        return "torch." + lifted_name(value.removeprefix("torch."), floor)
    return value


def _op(op: Op, floor: str) -> Op:
    kwargs = tuple((key, _argument(value, floor)) for key, value in op.kwargs)
    return replace(op, args=_argument(op.args, floor), kwargs=kwargs)


def _tensors(tensors: Tensors, floor: str) -> Tensors:
    return Tensors({name: t._replace(dtype=lifted_name(t.dtype, floor)) for name, t in tensors.items()})


def lifted_graph(graph: Graph, floor: str) -> Graph:
    return replace(
        graph,
        tensors=_tensors(graph.tensors, floor),
        ops=tuple(_op(op, floor) for op in graph.ops),
        prelude=tuple(_op(op, floor) for op in graph.prelude),
    )


def lifted_folded(folded: Folded, floor: str) -> Folded:
    blocks = tuple(replace(block, ops=tuple(_op(op, floor) for op in block.ops)) for block in folded.blocks)
    return replace(folded, tensors=_tensors(folded.tensors, floor), blocks=blocks)
