"""What experts make of gate and up, and its gradient."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tapas.ir.gating import ALONE, PAIRS, Gating

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Activation:
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]  # of the gradient and the forward's argument


ACTIVATIONS = {
    "silu": Activation(F.silu, aten.silu_backward),
    "gelu": Activation(F.gelu, aten.gelu_backward),
    "gelu_tanh": Activation(
        lambda x: F.gelu(x, approximate="tanh"), lambda g, x: aten.gelu_backward(g, x, approximate="tanh")
    ),
    "relu": Activation(F.relu, lambda g, x: aten.threshold_backward(g, x, 0)),
    "relu2": Activation(lambda x: F.relu(x).square(), lambda g, x: g * (2 * F.relu(x))),
}


def gated(packed: Tensor, gating: Gating) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The result, and what makes the gradient of `packed` out of that of the result."""
    act = ACTIVATIONS[gating.activation]
    if gating.packing == ALONE:
        return act.forward(packed), lambda grad: act.backward(grad, packed)
    gate, up = _unpacked(packed, gating.packing)
    limit, alpha, held, factor = gating.limit, gating.alpha, gate, up
    if limit is not None:
        held, factor = gate.clamp(max=limit), up.clamp(-limit, limit)
    if gating.shift:
        factor = factor + gating.shift
    held = held if alpha == 1.0 else held * alpha
    active = act.forward(held) if alpha == 1.0 else act.forward(held) / alpha

    def gradient(grad: Tensor) -> Tensor:
        of_gate, of_up = act.backward(grad * factor, held), grad * active
        if limit is not None:
            of_gate, of_up = of_gate.masked_fill(gate > limit, 0), of_up.masked_fill(up.abs() > limit, 0)
        return _packed(of_gate, of_up, gating.packing)

    return active * factor, gradient


def _unpacked(packed: Tensor, packing: str) -> tuple[Tensor, Tensor]:
    if packing == PAIRS:
        return packed[..., ::2], packed[..., 1::2]
    width = packed.shape[-1] // 2
    return packed[..., :width], packed[..., width:]


def _packed(gate: Tensor, up: Tensor, packing: str) -> Tensor:
    return torch.stack((gate, up), dim=-1).flatten(-2) if packing == PAIRS else torch.cat((gate, up), dim=-1)
