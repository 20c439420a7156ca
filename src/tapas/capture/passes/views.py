"""Which calls write, which results are views, and how a view's value is put back into its base."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tapas._torch import schema_of
from tapas.capture.calls import ExportedCall, FlatProgram, Value
from tapas.capture.passes.canonicalize import IDENTITY

aten = torch.ops.aten


@dataclass(slots=True)
class ViewOf:
    base: str  # the name it is a view of
    call: ExportedCall  # how it is made
    index: int  # which result of that call


@cache
def _writes(target: Any) -> tuple[int, str] | None:
    """Position and name of the argument an operator writes to."""
    for position, argument in enumerate(schema_of(target).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return position, argument.name
    return None


@cache
def _is_view(target: Any) -> bool:
    """Whether the results may share the memory of the first argument."""
    schema = schema_of(target)
    shared = any(result.alias_info is not None for result in schema.returns)
    return shared and bool(schema.arguments) and schema.arguments[0].alias_info is not None


def written_by(call: ExportedCall) -> str | None:
    """The name of the tensor a call writes to."""
    found = _writes(call.target)
    if found is None:
        return None
    position, name = found
    value = call.args[position] if position < len(call.args) else call.kwargs.get(name)
    return value.name if isinstance(value, Value) else None


def alias(call: ExportedCall, name: str) -> ExportedCall:
    """The result of an in-place call, as a view of what it wrote to."""
    return ExportedCall(aten.alias.default, (Value(name),), {}, call.results, call.grad, call.node)


def base_of(call: ExportedCall, program: FlatProgram) -> str | None:
    """The tensor whose memory the results share, if they do."""
    if not _is_view(call.target) or not call.args or not isinstance(call.args[0], Value):
        return None
    first = call.args[0].name
    return first if _shares(call, program.meta[first], program.meta[call.results[0]]) else None


def _shares(call: ExportedCall, base: torch.Tensor, result: torch.Tensor) -> bool:
    """Some calls return a view where they can and a copy where they cannot."""
    opname = call.opname
    if opname == "contiguous":
        return base.is_contiguous()
    if opname in ("to", "type_as"):
        return base.dtype == result.dtype
    if opname in ("reshape", "reshape_as", "flatten"):
        try:
            torch.empty_strided(base.shape, base.stride(), device="meta").view(result.shape)
        except RuntimeError:
            return False
    return True


def undo(view: ViewOf, base: Value, new: Value, meta: torch.Tensor, same: bool) -> tuple[Any, tuple[Any, ...]] | None:
    """The call that gives the base (shaped like `meta`) once its view has the value `new`; None if none does.

    `same` says that the view has the shape and dtype of its base.
    """
    call = view.call
    opname, rest = call.opname, call.args[1:]
    rank = meta.dim()
    match opname:
        case "slice":
            dim, start, end, step = (*rest, *(0, None, None, 1)[len(rest) :])
            return aten.slice_scatter.default, (base, new, dim, start, end, step)
        case "select":
            return aten.select_scatter.default, (base, new, *rest)
        case "diagonal":
            return aten.diagonal_scatter.default, (base, new, *rest)
        case "unbind":
            return aten.select_scatter.default, (base, new, rest[0] if rest else 0, view.index)
        case "transpose" | "swapaxes" | "swapdims":
            return aten.transpose.int, (new, *rest)
        case "t" | "numpy_T" | "mT" if rank == 2:
            return aten.transpose.int, (new, 0, 1)
        case "permute":
            order = [dim % rank for dim in rest[0]]
            return aten.permute.default, (new, tuple(order.index(dim) for dim in range(rank)))
        case "view" | "reshape" | "flatten" | "unsqueeze" | "squeeze" | "unflatten" | "view_as" | "reshape_as":
            if call.overload == "dtype":
                return None
            return aten.reshape.default, (new, tuple(meta.shape))
        case "detach":
            return None  # the base would lose its gradient
        case _ if same and opname in IDENTITY:
            return aten.alias.default, (new,)
    return None
