"""One rule per operator; every fact about the operator is a field of its rule. Importing this package registers all."""

from tapas.rules import (
    attention,
    conv,
    create,
    index,
    loss,
    matmul,
    moe,
    normalize,
    pointwise,
    pool,
    recurrent,
    reduce,
    resize,
    shape,
    view,
)
from tapas.rules.base import wording

__all__ = [
    "attention", "conv", "create", "index", "loss", "matmul", "moe", "normalize", "pointwise", "pool", "recurrent",
    "reduce", "resize", "shape", "view", "wording",
]  # fmt: skip
