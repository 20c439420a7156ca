"""Products whose activations travel in pieces: what one of them reads is gathered, or what it leaves is scattered,
piece by piece of its first dim (the batch), while other pieces are computed.

Which moves these are follows from what was decided, so that all who ask find the same ones.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from tapas.ir.fold import Block
from tapas.ir.graph import Op, Ref, Tensors, as_read
from tapas.plan.assignment import OUTPUT, BlockDecision, Journey, OperatorDecision, journeys
from tapas.sharding.layout import Layout, local_shape, split_of
from tapas.sharding.route import Hop, walked

PRODUCTS = ("aten.linear.default", "tapas.affine.default")  # rows first, and all of them by the same weight


@dataclass(frozen=True, slots=True)
class PiecedMove:
    """A step of a tensor over one axis, before a product or after it."""

    product: int  # among the operators of the block
    tensor: str
    reader: int | None  # the operator on whose way it is; None: all readers find it behind this step
    number: int  # of the step on that way
    layout: Layout  # before it
    hop: Hop
    gathers: bool  # otherwise it scatters
    back: bool  # what the product reads has a gradient, in the planned step

    def lengths(self, shape: Sequence[int], mesh: Sequence[int], coord: Sequence[int], pieces: int) -> list[int]:
        """Of the pieces on one rank. Whoever it sends to has the same: the axis does not split the first dim."""
        size = local_shape(shape, self.layout, mesh, coord)[0]
        count = min(pieces, size)
        return [size // count + (i < size % count) for i in range(count)]


def pieced_moves(
    block: Block, tensors: Tensors, decision: BlockDecision, mesh: Sequence[int], coord: Sequence[int], pieces: int
) -> dict[int, PiecedMove]:
    """On one rank, by product."""
    return {
        move.product: move
        for move in candidates(block, tensors, decision, mesh)
        if len(move.lengths(tensors[move.tensor].shape, mesh, coord, pieces)) > 1
    }


def candidates(block: Block, tensors: Tensors, decision: BlockDecision, mesh: Sequence[int]) -> Iterable[PiecedMove]:
    """Those of all ranks, some of which may have a single row. Of two that a product could do, it does that of what it
    reads."""
    found: dict[int, PiecedMove] = {}
    finding = _Finding(block, tensors, decision, mesh)
    for gathers in (True, False):
        for journey in journeys(block, tensors, decision):
            move = finding.move(journey, gathers)
            if move is not None:
                found.setdefault(move.product, move)
    return found.values()


class _Finding:
    def __init__(self, block: Block, tensors: Tensors, decision: BlockDecision, mesh: Sequence[int]) -> None:
        self.block, self.tensors, self.decision, self.mesh = block, tensors, decision, mesh
        self.makers = {name: number for number, op in enumerate(block.ops) for name in op.results}
        self.readers: dict[str, list[int]] = defaultdict(list)
        for number, op in enumerate(block.ops):
            for name in op.operands:
                self.readers[name].append(number)

    def move(self, journey: Journey, gathers: bool) -> PiecedMove | None:
        name, reader, readers = journey.tensor, journey.reader, self.readers[journey.tensor]
        if not journey.route or reader == OUTPUT or name in self.block.weights:
            return None
        if gathers:
            product = readers[0] if reader is None and readers else reader
        else:
            alone = reader is None or (len(readers) == 1 and name not in self.block.exports)
            product = self.makers.get(name) if alone else None
        if product is None or self.without_gradient(name, reader if reader is not None or not gathers else product):
            return None
        number = len(journey.route) - 1 if gathers else 0
        layout, hop = list(walked(journey.start, journey.route))[number]
        op, decided = self.block.ops[product], self.decision.operators[product]
        if not self.is_product(op, decided) or not self.is_even(name, layout, hop, gathers):
            return None
        if gathers and (op.operands[0] != name or (reader is None and decided.routes[0])):
            return None
        back = as_read(op, self.tensors)[0].priced
        return PiecedMove(product, name, reader, number, layout, hop, gathers, back)

    def without_gradient(self, name: str, reader: int | None) -> bool:
        """Whether a tensor that has one loses it on its way to a reader."""
        if reader is None:
            return False
        op = self.block.ops[reader]
        read = as_read(op, self.tensors)[op.operands.index(name)]
        return read.differentiable != self.tensors[name].differentiable

    def is_product(self, op: Op, decided: OperatorDecision) -> bool:
        """Of which every rank computes something."""
        last = [size - 1 for size in self.mesh]  # whoever has least
        (result,) = op.results if len(op.results) == 1 else ("",)
        return (
            op.target in PRODUCTS
            and op.args[0] == Ref(0)
            and prod(local_shape(self.tensors[result].shape, decided.results[0], self.mesh, last)) > 0
        )

    def is_even(self, name: str, layout: Layout, hop: Hop, gathers: bool) -> bool:
        """Whether a step gathers or scatters equal parts of another dim than the first, over one axis."""
        kind, split = ("all_gather", hop.old) if gathers else ("reduce_scatter", hop.new)
        if hop.forward != kind or len(hop.axes) != 1 or split.dim == 0 or split.tiling:
            return False
        axes, tiling = split_of(layout if gathers else hop.after(layout), split.dim)
        size = self.tensors[name].shape[split.dim]
        return size > 0 and not tiling and size % prod(self.mesh[axis] for axis in axes) == 0
