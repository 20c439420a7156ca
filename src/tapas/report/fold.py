"""What folding found: blocks, how often each occurs, and what that saves."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group

from tapas.ir.fold import Folded
from tapas.ir.graph import Graph
from tapas.report import units
from tapas.report.frame import line, page, table


@dataclass(frozen=True)
class FoldRow:
    block: str
    copies: int
    operators: int  # of one copy
    parameters: int  # of all copies
    reads: tuple[str, ...]
    exports: tuple[str, ...]
    paths: tuple[str, ...]


def rows(folded: Folded) -> list[FoldRow]:
    found = []
    for number, block in enumerate(folded.blocks):
        copies = folded.copies_of(number)
        each = sum(folded.tensors[name].elements for name in block.weights)
        paths = tuple(folded.copies[c].path for c in copies if folded.copies[c].path)
        found.append(
            FoldRow(block.name, len(copies), len(block.ops), each * len(copies), block.ports, block.exports, paths)
        )
    return found


def fold_dict(folded: Folded, graph: Graph) -> dict[str, Any]:
    return {
        "model": folded.name, "operators": folded.operators, "unique": folded.unique_operators,
        "trimmed": graph.trimmed, "blocks": [asdict(row) for row in rows(folded)], "notes": list(graph.notes),
    }  # fmt: skip


def _some(names: tuple[str, ...], shown: int = 3) -> str:
    more = len(names) - shown
    return "\n".join(names[:shown]) + (f"\nand {more} more" if more > 0 else "")


def fold_page(folded: Folded, graph: Graph, checked: bool = False) -> Group:
    found = rows(folded)
    columns = ("~block", ">copies", ">operators before", ">after", ">parameters", "~reads", "~gives")
    body: list[tuple] = [
        (r.block, str(r.copies), str(r.operators * r.copies), str(r.operators),
         units.count(r.parameters), _some(r.reads), _some(r.exports))
        for r in found
    ]  # fmt: skip
    before, after = folded.operators, folded.unique_operators
    parameters = units.count(sum(r.parameters for r in found))
    body += [("-",), ("total", str(len(folded.copies)), str(before), str(after), parameters, "", "")]
    found_out = f"{units.many(before, 'operator')}, none of them repeated"
    if after < before:
        found_out = f"{before} operators are copies of {after} unique ones ({before / after:.1f} times fewer)"
    return page(
        (
            line((folded.name, "bold"), f": {found_out}",
                 f"; {graph.trimmed} more were trimmed at capture" if graph.trimmed else ""),
            *(line(("warning: ", "bold yellow"), note) for note in graph.notes),
            *(("Traced whole as well: the same operators, wired in the same way.",) if checked else ()),
            table("Blocks, by the names of their first copies", columns, body),
        )
    )  # fmt: skip
