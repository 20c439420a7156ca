"""Operators that nobody described: they run whole. How much work they are, torch may know."""

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from tapas.ir.interpreter import arguments, resolve
from tapas.rules.base import Call, Rule
from tapas.rules.matmul import recurrent_flops

# Recurrent layers on packed sequences of different lengths: data, batch_sizes, hx, params, ...
_PACKED = frozenset(f"aten.{name}.data" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))


def without_rule(call: Call) -> Rule:
    """Runs whole; `unknown_work` if neither torch's formulas nor the operator's kind tell its work."""
    try:
        function: Any = resolve(call.target)
    except AttributeError:  # an operator of a library that is not loaded here
        return Rule(missing=True, unknown_work=True)
    flops = _counted(call, function)
    light = bool({torch.Tag.pointwise, torch.Tag.reduction} & set(function.tags))
    tiny = all(prod(t.shape) <= 1 for t in (*call.operands, *call.results))
    random = torch.Tag.nondeterministic_seeded in function.tags
    return Rule(missing=True, flops=flops, unknown_work=not (flops or light or tiny), random=random)


def _counted(call: Call, function: Any) -> float:
    """The products and convolutions that the operator is made of, as torch counts them on tensors without data."""
    if call.target in _PACKED:
        return recurrent_flops(call, call.args[3], call.operands[0].shape[0])
    tensors = [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in call.operands]
    args, kwargs = arguments(call.args, call.kwargs, tensors)
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            function(*args, **kwargs)
    except Exception:  # an operator may fail in any way without data: then nothing is known
        return 0.0
    return float(counter.get_total_flops())
