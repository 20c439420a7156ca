"""One rule per operator; every fact about the operator is a field of its rule. Importing this package registers all."""

from tapas.rules import (
    attention,
    cache,
    index,
    loss,
    matmul,
    normalize,
    pointwise,
    reduce,
    resize,
    shape,
    spatial,
    view,
    window_attention,
)
from tapas.rules.base import wording

__all__ = [
    "attention", "cache", "index", "loss", "matmul", "normalize", "pointwise", "reduce", "resize", "shape", "spatial",
    "view", "window_attention", "wording",
]  # fmt: skip
