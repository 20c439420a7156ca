"""Which tensors a gradient flows through."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from tapas.graph import Op

# Floating-point results that do not depend on their operands' values, or are cut off on purpose.
_CUT = frozenset((
    "detach", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "bernoulli", "one_hot", "histc", "floor_divide", "sign", "heaviside", "bincount",
))  # fmt: skip

_FLOATING = ("float", "bfloat", "complex")


def floating(dtype: str) -> bool:
    return dtype.startswith(_FLOATING)


Flow = Callable[[set[str]], set[str]]  # from what comes in to what goes out


def reached(
    ops: Iterable[Op], dtypes: Mapping[str, str], sources: Iterable[str], no_grad: set[str],
    blocks: Mapping[str, Flow] | None = None,
) -> set[str]:  # fmt: skip
    """Tensors that depend on `sources` through differentiable operators.

    `no_grad` holds the names of the operators that ran under torch.no_grad(); `blocks` tells of calls of
    blocks which of their results depend on which operands.
    """
    found = set(sources)
    for op in ops:
        if blocks and op.name in blocks:
            found |= blocks[op.name](found)
        elif op.name not in no_grad and op.target.split(".")[1] not in _CUT and not found.isdisjoint(op.operands):
            found.update(name for name in op.results if floating(dtypes[name]))
    return found


def needed(
    ops: Sequence[Op], depends: set[str], wanted: Iterable[str], blocks: Mapping[str, Flow] | None = None
) -> set[str]:
    """Those of the tensors that depend on sources on which `wanted` ones depend."""
    found = {name for name in wanted if name in depends}
    for op in reversed(ops):
        if blocks and op.name in blocks:
            found |= blocks[op.name](found)
        elif not found.isdisjoint(op.results):
            found.update(name for name in op.operands if name in depends)
    return found
