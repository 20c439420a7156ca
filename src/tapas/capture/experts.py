"""Mixtures of experts of transformers as one operator, where that computes what they compute.

How a module's weights lie is said by its attributes, as its own implementations read them. What it does between its two
products is code of its own: that is run on some numbers, and compared with all that the operator can do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tapas._torch import gate_of, no_dispatch_modes
from tapas.ir.gating import ALONE, HALVES, PAIRS, Gating

_OTHERWISE = ("has_post_expert_norm", "_is_expert_parallel")  # does more than the operator


@contextmanager
def experts_as_operators() -> Iterator[None]:
    from transformers.integrations import moe

    def chosen(interface: Any, implementation: str | None, default: Callable[..., Tensor]) -> Callable[..., Tensor]:
        own = interface["grouped_mm"] if implementation in (None, "eager") else interface[implementation]
        return lambda module, *args, **kwargs: (_operator(module) or own)(module, *args, **kwargs)

    with mock.patch.object(moe.ExpertsInterface, "get_interface", chosen):
        yield


def _operator(module: nn.Module) -> Callable[..., Tensor] | None:
    weights, gating = _weights(module), gating_of_module(module)
    if weights is None or gating is None:
        return None
    words = str(gating)

    def call(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        from tapas.ir.custom_ops import experts

        up, down, *biases = weights
        return experts(hidden_states, top_k_index, top_k_weights, up, down, words, *biases)

    return call


def gating_of_module(module: nn.Module) -> Gating | None:
    """How the operator would compute these experts; none if it cannot."""
    weights, gated = _weights(module), getattr(module, "has_gate", False)
    between = gate_of(module) if gated else getattr(module, "act_fn", None)
    if weights is None or between is None or any(getattr(module, name, False) for name in _OTHERWISE):
        return None
    transposed, numbers = bool(module.is_transposed), [x for x in vars(module).values() if isinstance(x, float)]
    gating = _recognised(between, numbers, (HALVES, PAIRS) if gated else (ALONE,), transposed)
    if gating is None:
        return None
    up, down = (x.mT if transposed else x for x in weights[:2])
    fits = up.shape[1] == gating.parts * down.shape[2] and up.shape[::2] == down.shape[:2]
    return gating if fits else None


def _weights(module: nn.Module) -> list[Tensor] | None:
    """Of both products, and their biases."""
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
        return None
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    dims = [3, 3]
    if getattr(module, "has_bias", False):
        names, dims = [*names, *(f"{name}_bias" for name in names)], [3, 3, 2, 2]
    found = [getattr(module, name, None) for name in names]
    if any(not isinstance(x, Tensor) or x.dim() != d for x, d in zip(found, dims, strict=True)):
        return None
    return [x for x in found if x is not None]


def _recognised(
    between: Callable[[Tensor], Tensor], numbers: list[float], packings: tuple[str, ...], transposed: bool
) -> Gating | None:
    """Small numbers tell activations apart, and large ones their limits."""
    from tapas.ir.activations import ACTIVATIONS, gated

    with no_dispatch_modes(), torch.no_grad():
        waves = torch.arange(64 * 8, dtype=torch.float64, device="cpu").view(64, 8).sin()
        packed = torch.cat((4 * waves, 3 * max(10.0, *map(abs, numbers), 0.0) * waves.flip(1)))
        try:
            wanted = between(packed)
        except Exception:  # it takes more than that
            return None
        for name, packing, limit, alpha, shift in product(
            ACTIVATIONS, packings, (None, *numbers), (1.0, *numbers), (0.0, 1.0)
        ):
            if packing == ALONE and (limit, alpha, shift) != (None, 1.0, 0.0):
                continue
            if alpha == 0 or (limit is not None and limit < 0):
                continue
            gating = Gating(name, packing, limit, alpha, shift, transposed)
            made, _ = gated(packed, gating)
            if made.shape == wanted.shape and torch.allclose(made, wanted, rtol=1e-10, atol=1e-10):
                return gating
    return None
