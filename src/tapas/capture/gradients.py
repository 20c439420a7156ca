"""Which tensors a gradient flows through."""

from collections.abc import Iterable, Mapping

from tapas.graph import Op

# Floating-point results that do not depend on their operands' values, or are cut off on purpose.
_CUT = frozenset((
    "detach", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "bernoulli", "one_hot", "histc", "floor_divide", "sign", "heaviside", "bincount",
))  # fmt: skip

_FLOATING = ("float", "bfloat", "complex")


def floating(dtype: str) -> bool:
    return dtype.startswith(_FLOATING)


def differentiable(
    ops: Iterable[Op], dtypes: Mapping[str, str], sources: Iterable[str], no_grad: set[str], loss: str
) -> set[str]:
    """Tensors that depend on `sources` and that the loss depends on, through differentiable operators.

    `no_grad` holds the names of the operators that ran under torch.no_grad().
    """
    ops = list(ops)
    reached = set(sources)
    for op in ops:
        if op.name not in no_grad and op.target.split(".")[1] not in _CUT and not reached.isdisjoint(op.operands):
            reached.update(name for name in op.results if floating(dtypes[name]))
    if loss not in reached:
        return set()
    needed = {loss}
    for op in reversed(ops):
        if not needed.isdisjoint(op.results):
            needed.update(name for name in op.operands if name in reached)
    return needed
