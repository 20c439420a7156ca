"""The table of rules: importing this package registers them all."""

from tapas.rules import (
    attention,
    conv,
    create,
    embedding,
    index,
    loss,
    matmul,
    moe,
    norm,
    pointwise,
    pool,
    recurrent,
    reduce,
    resize,
    shape,
    softmax,
    view,
)

__all__ = [
    "attention", "conv", "create", "embedding", "index", "loss", "matmul", "moe", "norm", "pointwise", "pool",
    "recurrent", "reduce", "resize", "shape", "softmax", "view",
]  # fmt: skip
