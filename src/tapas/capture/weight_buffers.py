"""Which buffers are weights: frozen parameters of the graph, stored split and read where they are needed.

Quantised weights are buffers, and so are masks and tables of positions. What tells them apart is what reads them. A
buffer is a weight if it is large, forward never writes to it, and it is an operand of a product with something that
depends on inputs, by itself or with what is made of it and of other tensors of the model alone: a cast, a scale, bits
that are unpacked. All other buffers are whole on every rank, and what depends on them alone is computed once.
"""

from collections.abc import Container, Iterable
from dataclasses import replace

from tapas.capture.calls import ExportedCall, FlatProgram, Value, operands
from tapas.capture.leaves import LiftedInputs
from tapas.ir.graph import Leaf

LARGE = 4096  # bytes: an int8 weight of 64 x 64; what is smaller is not worth being dealt out

_PRODUCTS = frozenset((
    "linear", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "addbmm", "einsum", "bilinear", "_int_mm",
    "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "experts",
))  # fmt: skip
_LOOKUPS = frozenset(("embedding", "embedding_bag"))  # products with rows of a unit matrix


def with_weights(
    leaves: LiftedInputs, calls: Iterable[ExportedCall], program: FlatProgram, written: Container[str]
) -> LiftedInputs:
    """The leaves of a model, or of a submodule, with buffers that are weights as parameters."""
    found = _weights(leaves.leaves, calls, program, written)
    return replace(leaves, leaves=as_parameters(leaves.leaves, found)) if found else leaves


def as_parameters(leaves: Iterable[Leaf], names: Container[str]) -> tuple[Leaf, ...]:
    return tuple(leaf._replace(kind="parameter") if leaf.tensor in names else leaf for leaf in leaves)


def _weights(
    leaves: Iterable[Leaf], calls: Iterable[ExportedCall], program: FlatProgram, written: Container[str]
) -> set[str]:
    nothing: frozenset[str] = frozenset()
    made_of: dict[str, frozenset[str]] = {}  # for what does not depend on inputs: the buffers that it is made of
    for leaf in leaves:
        if leaf.kind != "input":
            may_be = leaf.kind == "buffer" and leaf.tensor not in written
            large = may_be and program.meta[leaf.tensor].nbytes >= LARGE
            made_of[leaf.tensor] = frozenset((leaf.tensor,)) if large else nothing
    made_of.update(dict.fromkeys(program.attributes, nothing))
    found: set[str] = set()
    for call in calls:
        names = operands(call)
        if all(name in made_of for name in names):
            made_of.update(dict.fromkeys(call.results, nothing.union(*(made_of[name] for name in names))))
        elif call.opname in _PRODUCTS or call.opname in _LOOKUPS:
            read = names if call.opname in _PRODUCTS else [v.name for v in call.args[:1] if isinstance(v, Value)]
            found.update(*(made_of.get(name, nothing) for name in read))
    return found
