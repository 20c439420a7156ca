"""Copies of a block that users tell apart become blocks of their own."""

from collections.abc import Sequence
from dataclasses import replace

from tapas.ir.fold import Block, Copy, Folded
from tapas.ir.patterns import inside, matches


def split(folded: Folded, patterns: Sequence[str]) -> Folded:
    """Part copies that are told apart by patterns of names, such as `model.layers.3.*`: copies of one
    block match the same patterns at the same places."""
    if not patterns:
        return folded
    blocks: list[Block] = []
    copies: list[Copy] = []
    number: dict[tuple, int] = {}
    for copy in folded.copies:
        block = _as_copy(folded, folded.blocks[copy.block], copy) if copy.path else folded.blocks[copy.block]
        names = [op.module for op in block.ops]
        names += [path for name in block.weights for path in folded.leaf_of[name].paths]
        tag = tuple(matches(name, pattern) for pattern in patterns for name in names)
        if (copy.block, tag) not in number:
            number[copy.block, tag] = len(blocks)
            blocks.append(block)
        copies.append(copy._replace(block=number[copy.block, tag]))
    return replace(folded, blocks=tuple(blocks), copies=tuple(copies))


def _as_copy(folded: Folded, block: Block, copy: Copy) -> Block:
    """The block by the names of another copy (its inner tensors keep theirs)."""
    own = next(c for c in folded.copies if folded.blocks[c.block] is block)
    renamed = dict(zip((*block.weights, *block.constants), (*copy.weights, *copy.constants), strict=True))
    ops = tuple(
        replace(
            op,
            operands=tuple(renamed.get(name, name) for name in op.operands),
            module=inside(op.module, own.path, copy.path),
        )
        for op in block.ops
    )
    return replace(block, ops=ops, weights=copy.weights, constants=copy.constants)
