"""Sharded implementations with their own small collectives, by the names that rules give them.

A rank runs `kernel(local, comms, *operands)` instead of the operator where the factor chosen on any axis
has a `Kernel` and the rule names one.
"""

from tapas.runtime.kernels.attention import attention
from tapas.runtime.kernels.conv import channelwise, convolution
from tapas.runtime.kernels.index import embedding, gather, index, index_put, one_hot, scatter
from tapas.runtime.kernels.loss import cross_entropy, mean_loss, nll_loss
from tapas.runtime.kernels.moe import experts, grouped_mm
from tapas.runtime.kernels.norm import batch_norm, group_norm, layer_norm, rms_norm
from tapas.runtime.kernels.reduce import mean
from tapas.runtime.kernels.softmax import log_softmax, softmax

__all__ = [
    "attention", "batch_norm", "channelwise", "convolution", "cross_entropy", "embedding", "experts", "gather",
    "group_norm", "grouped_mm", "index", "index_put", "layer_norm", "log_softmax", "mean", "mean_loss", "nll_loss",
    "one_hot", "rms_norm", "scatter", "softmax",
]  # fmt: skip
