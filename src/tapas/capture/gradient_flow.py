"""Which tensors a gradient flows through."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from tapas.ir.graph import Op

# Floating-point results that do not depend on their operands' values, or are cut off on purpose.
_CUT = frozenset((
    "detach", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "bernoulli", "one_hot", "histc", "floor_divide", "sign", "heaviside", "bincount",
))  # fmt: skip

_FLOATING = ("float", "bfloat", "complex")


def floating(dtype: str) -> bool:
    return dtype.startswith(_FLOATING)


class BlockFlow(Protocol):
    """A call of many operators, which tells itself what flows through it."""

    def ahead(self, depends: set[str]) -> Iterable[str]:
        """The results that depend on sources, if these tensors do."""
        ...

    def back(self, wanted: set[str]) -> Iterable[str]:
        """The operands that a gradient flows to, if it comes from these tensors."""
        ...


def reached(
    ops: Iterable[Op | BlockFlow], dtypes: Mapping[str, str], sources: Iterable[str], no_grad: set[str]
) -> set[str]:
    """Tensors that depend on `sources` through differentiable operators.

    `no_grad` holds the names of the operators that ran under torch.no_grad().
    """
    found = set(sources)
    for op in ops:
        if not isinstance(op, Op):
            found.update(op.ahead(found))
        elif op.name not in no_grad and op.target.split(".")[1] not in _CUT and not found.isdisjoint(op.operands):
            found.update(name for name in op.results if floating(dtypes[name]))
    return found


def needed(ops: Sequence[Op | BlockFlow], depends: set[str], wanted: Iterable[str]) -> set[str]:
    """Those of the tensors that depend on sources on which `wanted` ones depend."""
    found = {name for name in wanted if name in depends}
    for op in reversed(ops):
        if not isinstance(op, Op):
            found.update(op.back(found))
        elif not found.isdisjoint(op.results):
            found.update(name for name in op.operands if name in depends)
    return found
