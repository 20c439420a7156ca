"""Blocks that do not keep their activations: they are computed again when the backward pass gets there."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from tapas.rules.base import Rule
from tapas.rules.recompute import SELECTIVE

_inside = threading.local()  # whether an operator is at work of which nothing is kept


def _policy(products: frozenset[str], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = str(operator) in products and not getattr(_inside, "again", False)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class ComputedAgain(nn.Module):
    """An operator of which a selective block keeps nothing, though it multiplies matrices inside: recurrent layers
    go on to change these products in place."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _inside.again = True
        try:
            return self.function(*args, **kwargs)
        finally:
            _inside.again = False


def recomputable(function: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    """An operator as a selective block has to call it."""
    return ComputedAgain(function) if rule.flops and not rule.products else function


class Recomputed(nn.Module):
    """A block in another mode than keeping everything. What a selective one keeps are the results of products."""

    def __init__(self, block: nn.Module, mode: str, products: frozenset[str]) -> None:
        super().__init__()
        self.block, policy = block, partial(_policy, products)
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if mode == SELECTIVE else {}
        self.checkpoint = partial(checkpoint, use_reentrant=False, **contexts)

    def forward(self, *args: torch.Tensor) -> Any:
        # to the end, though the last operators are not needed: so that as much is sent as was predicted
        with set_checkpoint_early_stop(False):
            return self.checkpoint(self.block, *args)
