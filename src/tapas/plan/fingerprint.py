"""The structure of a folded graph, as text: it tells whether a plan belongs to a model.

Module paths, operators, their wiring and the shapes of parameters; no shapes of activations, dtypes or other arguments
(but for the capacity of experts): a plan may be run with another batch or in another precision. Blocks of the same
structure are one, however copies were told apart when the plan was made.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tapas.ir.capacity import EXPERTS
from tapas.ir.fold import Block, Folded
from tapas.ir.graph import Op


@dataclass(frozen=True, slots=True)
class BlockStructure:
    """A block, by names below its copies: `w0` is its first weight, `p0` its first port, `c0` its first constant, `3.0`
    the first result of its operator number 3."""

    operators: tuple[str, ...]  # "mlp.up_proj: aten.linear.default(2.0, w4)"
    weights: tuple[str, ...]  # "mlp.up_proj.weight 14336x4096"
    exports: tuple[str, ...]
    ports: int
    constants: int


@dataclass(frozen=True, slots=True)
class CopyStructure:
    structure: int  # which of the blocks it is a copy of
    path: str
    ports: tuple[tuple[int, int], ...]  # for each port: copy number, export number


@dataclass(frozen=True, slots=True)
class GraphStructure:
    blocks: tuple[BlockStructure, ...]
    copies: tuple[CopyStructure, ...]
    outputs: tuple[tuple[int, int], ...]  # copy number, export number

    @property
    def fingerprint(self) -> str:
        """Equal for equal structures, and for others practically never."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def structure_of(folded: Folded) -> GraphStructure:
    numbers: dict[BlockStructure, int] = {}
    by_block: dict[int, int] = {}
    for copy in folded.copies:
        if copy.block not in by_block:
            made = _block_structure(folded, folded.blocks[copy.block], copy.path)  # a block is named by its first copy
            by_block[copy.block] = numbers.setdefault(made, len(numbers))
    copies = [CopyStructure(by_block[copy.block], copy.path, copy.ports) for copy in folded.copies]
    return GraphStructure(tuple(numbers), tuple(copies), folded.outputs)


def main_dtype(folded: Folded) -> str:
    """That of most parameters."""
    times, elements = Counter(copy.block for copy in folded.copies), Counter[str]()
    for number, block in enumerate(folded.blocks):
        for tensor in map(folded.tensors.__getitem__, block.weights):
            elements[tensor.dtype] += times[number] * tensor.elements
    return max(elements, key=lambda dtype: elements[dtype], default="")


def tensor_references(block: Block) -> dict[str, str]:
    """What each tensor of a block is called in its structure."""
    named: dict[str, str] = {}
    for letter, names in (("w", block.weights), ("p", block.ports), ("c", block.constants)):
        named.update((name, f"{letter}{number}") for number, name in enumerate(names))
    for number, op in enumerate(block.ops):
        named.update((name, f"{number}.{result}") for result, name in enumerate(op.results))
    return named


def _block_structure(folded: Folded, block: Block, prefix: str) -> BlockStructure:
    references = tensor_references(block)

    def below(path: str) -> str:
        return path.removeprefix(prefix).removeprefix(".") if prefix else path

    def text(op: Op) -> str:
        said = [f"capacity {value:g}" for key, value in op.kwargs if key == "capacity" and op.target == EXPERTS]
        return f"{below(op.module)}: {op.target}({', '.join([*map(references.__getitem__, op.operands), *said])})"

    weights: list[str] = []
    for name in block.weights:
        shape = "x".join(map(str, folded.tensors[name].shape))
        weights.append(f"{' = '.join(map(below, folded.leaf_of[name].paths))} {shape}")
    exports = tuple(references[name] for name in block.exports)
    return BlockStructure(tuple(map(text, block.ops)), tuple(weights), exports, len(block.ports), len(block.constants))


def difference(planned: GraphStructure, found: GraphStructure) -> str:
    """Where a model is first of all not the one that was planned, as a fact about it; "" if nowhere."""
    compared: set[tuple[int, int]] = set()
    for wanted, have in zip(planned.copies, found.copies, strict=False):
        if wanted.path != have.path:
            return f"it continues {_place(have.path)} where the plan continues {_place(wanted.path)}"
        if (pair := (wanted.structure, have.structure)) not in compared:
            compared.add(pair)
            fact = _block_difference(planned.blocks[pair[0]], found.blocks[pair[1]])
            if fact:
                return f"{_place(have.path)}: {fact}"
        if wanted.ports != have.ports:
            return f"{_place(have.path)} reads other tensors of other layers than in the plan"
    if len(planned.copies) != len(found.copies):
        return f"it has {len(found.copies)} blocks where the plan has {len(planned.copies)}"
    return "" if planned.outputs == found.outputs else "it returns other tensors than in the plan"


def _place(path: str) -> str:
    return f"in {path}" if path else "outside of its layers"


def _block_difference(planned: BlockStructure, found: BlockStructure) -> str:
    for what, wanted, have in _pairs(planned, found):
        if wanted != have:
            return f"{what} is {have or 'not there'}, in the plan {wanted or 'not there'}"
    return ""


def _pairs(planned: BlockStructure, found: BlockStructure) -> Iterator[tuple[str, str, str]]:
    for kind in ("weights", "operators", "exports"):
        wanted, have = getattr(planned, kind), getattr(found, kind)
        for number in range(max(len(wanted), len(have))):
            one = wanted[number] if number < len(wanted) else ""
            two = have[number] if number < len(have) else ""
            yield f"{kind[:-1]} {number}", one, two
    yield "the number of its ports", str(planned.ports), str(found.ports)
    yield "the number of its constants", str(planned.constants), str(found.constants)
