"""One spelling for each meaning: fewer operators for the rules to know, and none that changes nothing."""

from collections.abc import Callable
from typing import Any

import torch

from tapas.capture.calls import OWN_PRECISION, ExportedCall, FlatProgram, Value

aten = torch.ops.aten

# The result is the first argument when its shape and dtype are. Memory layout is not part of our graph: most copies
# that models make for its sake are wasted. `contiguous` stays where it brings the last dim together in memory, for
# attention whose mask has that dim strided is not fused, and keeps all scores.
IDENTITY = frozenset((
    "alias", "contiguous", "clone", "to", "_to_copy", "type_as", "lift_fresh", "lift_fresh_copy", "lift", "expand",
    "expand_as", "view", "view_as", "reshape", "reshape_as", "flatten", "_unsafe_view", "unflatten", "copy",
    "positive", "requires_grad", "resolve_conj", "resolve_neg", "real", "slice", "broadcast_to", "_assert_async",
    "sym_constrain_range", "pin_memory", "cpu", "cuda",
))  # fmt: skip

_RESHAPES = frozenset(("view", "view_as", "reshape_as", "flatten", "_unsafe_view", "unflatten", "reshape"))
_EXPANDS = frozenset(("expand", "expand_as", "broadcast_to"))
_CASTS = frozenset(("to", "_to_copy", "type_as"))
# Made from the shape and dtype of their first argument only: a constant of the size is all there is to it.
_FILLED = {"zeros_like": 0, "new_zeros": 0, "ones_like": 1, "new_ones": 1, "zero": 0}

_DROPPED_KEYWORDS = frozenset(("device", "layout", "memory_format", "pin_memory", "non_blocking", "copy"))


def simplify(call: ExportedCall, program: FlatProgram) -> ExportedCall | Value:
    """The call in its plainest form, or the tensor that its result equals."""
    if len(call.results) != 1 or call.target.namespace != "aten":
        return call
    opname = call.opname
    result = program.meta[call.results[0]]
    first = call.args[0] if call.args and isinstance(call.args[0], Value) else None
    same = False
    if first is not None:
        source = program.meta[first.name]
        same = source.shape == result.shape and source.dtype == result.dtype
        if opname == "contiguous" and same and _strided(source) and not call.args[1:] and not call.kwargs:
            return call
    if opname in _CASTS and call.node.meta.get(OWN_PRECISION):  # under the caller's autocast, it may be a cast
        same = False
    if first is not None and same and (opname in IDENTITY or _neutral(call, opname)):
        # Under no_grad the copy is cut off from the gradient: `detach` says so.
        return first if call.grad else call.at_its_place(aten.detach.default, (first,))
    form = _FORMS.get(opname)
    return form(call, program, result) if form else call


def _strided(tensor: torch.Tensor) -> bool:
    """Whether the elements of the last dim do not lie side by side."""
    return tensor.dim() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1


def _neutral(call: ExportedCall, opname: str) -> bool:
    """Arithmetic and regularisation that changes nothing."""
    args: Any = call.args
    if opname in ("dropout", "feature_dropout", "alpha_dropout", "native_dropout"):
        return len(args) > 2 and (args[1] == 0 or args[2] is False)
    other = args[1] if len(args) > 1 else None
    if isinstance(other, Value):
        return False
    if opname in ("add", "sub"):
        return other == 0 and type(other) in (int, float)
    if opname in ("mul", "div"):
        return other == 1 and type(other) in (int, float) and not call.kwargs
    if opname in ("pad", "constant_pad_nd"):
        return not any(args[1])
    return opname in ("repeat", "tile") and all(n == 1 for n in args[1])


def _reshape(call: ExportedCall, program: FlatProgram, result: torch.Tensor) -> ExportedCall:
    if call.overload == "dtype":  # a view of the bits, not of the shape
        return call
    return call.at_its_place(aten.reshape.default, (call.args[0], tuple(result.shape)))


def _expand(call: ExportedCall, program: FlatProgram, result: torch.Tensor) -> ExportedCall:
    return call.at_its_place(aten.expand.default, (call.args[0], tuple(result.shape)))


def _cast(call: ExportedCall, program: FlatProgram, result: torch.Tensor) -> ExportedCall:
    return call.at_its_place(aten.to.dtype, (call.args[0], result.dtype))


def _filled(call: ExportedCall, program: FlatProgram, result: torch.Tensor) -> ExportedCall:
    """Constants made after the shape of integer tensors are constants; those of activations stay with them,
    for a whole activation per rank would be a waste."""
    source = program.meta[call.args[0].name]
    opname = call.opname
    if source.is_floating_point() and source.shape == result.shape:
        value = call.args[1] if opname == "fill" else _FILLED.get(opname)
        plain_fill = opname in ("fill", "zero") and not isinstance(value, Value)
        return call.at_its_place(aten.full_like.default, (call.args[0], value)) if plain_fill else call
    size = tuple(result.shape)
    if opname in ("full_like", "new_full", "fill"):
        value = call.args[2] if opname == "new_full" else call.args[1]
        if isinstance(value, Value):
            fits = opname == "fill" and program.meta[value.name].dtype == result.dtype
            return call.at_its_place(aten.expand.default, (value, size)) if fits else call
    else:
        value = _FILLED[opname]
    return call.at_its_place(aten.full.default, (size, value), dtype=result.dtype)


def _empty(call: ExportedCall, program: FlatProgram, result: torch.Tensor) -> ExportedCall:
    """Uninitialised memory has no value worth keeping; zeros are as good and reproducible."""
    return call.at_its_place(aten.full.default, (tuple(result.shape), 0), dtype=result.dtype)


def _transpose(call: ExportedCall, program: FlatProgram, result: torch.Tensor) -> ExportedCall | Value:
    if result.dim() < 2:
        return call.args[0] if call.grad else call
    if call.opname == "numpy_T" and result.dim() != 2:
        return call.at_its_place(aten.permute.default, (call.args[0], tuple(reversed(range(result.dim())))))
    return call.at_its_place(aten.transpose.int, (call.args[0], -2, -1))


_FORMS: dict[str, Callable[[ExportedCall, FlatProgram, torch.Tensor], ExportedCall | Value]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_EXPANDS, _expand),
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys((*_FILLED, "full_like", "new_full", "fill"), _filled),
    **dict.fromkeys(("empty_like", "new_empty", "empty"), _empty),
    **dict.fromkeys(("t", "mT", "numpy_T", "adjoint"), _transpose),
}


def plain(value: Any) -> Any:
    """Arguments as the graph holds them: tuples, numbers, strings, None."""
    if isinstance(value, (list, tuple)):
        return tuple(plain(item) for item in value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return None
    return value


def keyword_items(kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The keywords that mean something wherever the operator runs."""
    return [(key, value) for key, value in kwargs.items() if key not in _DROPPED_KEYWORDS and value is not None]
