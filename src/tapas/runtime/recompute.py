"""Blocks that do not keep their activations: they are computed again when the backward pass gets there."""

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

from tapas.problem.problem import SELECTIVE

aten = torch.ops.aten
# what products come down to; in a selective block their results are kept
PRODUCTS = frozenset(
    {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)  # fmt: skip


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class Recomputed(nn.Module):
    """A block in another mode than keeping everything."""

    def __init__(self, block: nn.Module, mode: str) -> None:
        super().__init__()
        self.block = block
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if mode == SELECTIVE else {}
        self.checkpoint = partial(checkpoint, use_reentrant=False, **contexts)

    def forward(self, *args: torch.Tensor) -> Any:
        # to the end, though the last operators are not needed: so that as much is sent as was predicted
        with set_checkpoint_early_stop(False):
            return self.checkpoint(self.block, *args)
