"""How the weights are stored and the work on them is split: one row per weight, blocks as headings; and its legend."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rich.table import Table
from rich.text import Text

from tapas.plan.plan import Move, Operator, Plan
from tapas.report import units
from tapas.report.frame import ROOMY, Cell, heading, table
from tapas.report.words import op_name, storage, traffic, work
from tapas.rules.base import wording

MANY = 16  # rows of one block: beyond, weights that are treated alike share a row
TOO_MANY = 60  # rows of all blocks: beyond, they do so wherever they are


@dataclass(frozen=True)
class WeightRow:
    """A weight, or an operator worth a row that has none (attention)."""

    block: str
    name: str
    shape: str
    stored: str
    work: str
    traffic: str

    @property
    def treatment(self) -> tuple[str, str, str]:
        return self.stored, self.work, self.traffic


def rows_of(plan: Plan) -> list[WeightRow]:
    axes = plan.mesh["names"]
    moves: dict[str, list[Move]] = defaultdict(list)
    for move in plan.moves:
        moves[move.tensor].append(move)
    names: dict[str, str] = {}
    for alias, name in plan.tied.items():
        names[name] = names.get(name, name) + f"\n  = {alias}"
    found: list[WeightRow] = []
    known: set[str] = set()
    for op in plan.operators:
        for weight in op.weights:
            if weight in known or weight not in plan.parameters:
                continue
            known.add(weight)
            found.append(
                WeightRow(op.block, names.get(weight, weight), units.shape(plan.shapes.get(weight, [])),
                    storage(plan.parameters[weight], axes), _work(plan, weight),
                    traffic(moves[weight], axes, plan.training))
            )  # fmt: skip
        if not op.weights and _worth_a_row(op):
            found.append(WeightRow(op.block, op_name(op.module, op.target), "", "", work(op, axes), ""))
    unread = [name for name in plan.parameters if name not in known and name not in plan.tied]
    for name in unread:  # a plan written by other means may not say who reads what
        shape, stored = units.shape(plan.shapes.get(name, [])), storage(plan.parameters[name], axes)
        found.append(WeightRow("", name, shape, stored, "", ""))
    return found


def _work(plan: Plan, weight: str) -> str:
    """How the operators that read a weight are split; the heaviest speaks for all of the same split."""
    readers = sorted((op for op in plan.operators if weight in op.weights), key=lambda op: -op.seconds)
    return " /\n".join(dict.fromkeys(work(op, plan.mesh["names"]) for op in readers))


def _worth_a_row(op: Operator) -> bool:
    return wording(op.target).listed


def _merged(rows: list[WeightRow]) -> list[WeightRow]:
    """Rows of the same treatment as one, named by the first of them."""
    alike: dict[tuple, list[WeightRow]] = defaultdict(list)
    for row in rows:
        alike[row.treatment].append(row)
    made = []
    for group in alike.values():
        first, more = group[0], len(group) - 1
        what = "weight" if first.shape else "operator"  # an operator is not stored: the two never mix
        name = f"{_first(first.name)} and {units.many(more, f'more {what}')} like it" if more else first.name
        made.append(WeightRow(first.block, name, first.shape if not more else "", *first.treatment))
    return made


def _first(name: str) -> str:
    """Without the other names of a tied weight."""
    return name.partition("\n")[0].removesuffix(".weight")


def _rows(plan: Plan) -> Iterable[tuple[Cell, ...]]:
    copies = {block.name: block.copies for block in plan.blocks if block.paths}
    everything = rows_of(plan)
    if len(everything) > TOO_MANY:
        everything = [replace(row, block="") for row in _merged(everything)]
    blocks: dict[str, list[WeightRow]] = defaultdict(list)
    for row in everything:
        blocks[row.block].append(row)
    for block, rows in blocks.items():
        repeated = block in copies
        if repeated:
            yield heading(f"{block} × {copies[block]}" if copies[block] > 1 else block, 5)
            rows = [replace(row, name=row.name.removeprefix(f"{block}.")) for row in rows]
        for row in _merged(rows) if len(rows) > MANY else rows:
            lines = [line.removesuffix(".weight") for line in row.name.splitlines()]
            name = "\n".join(f"  {line}" if repeated else line for line in lines)
            yield (name, row.shape, row.stored, row.work, row.traffic)


def weights_table(plan: Plan, width: int) -> Table:
    """Where there is little room, names are worth more than shapes."""
    columns = ("~weight", "!shape", "stored split on", "work split on", "weight sent")
    rows: Iterable[tuple[Cell, ...]] = _rows(plan)
    if width < ROOMY:
        columns, rows = (columns[0], *columns[2:]), ((row[0], *row[2:]) for row in rows)
    return table("How weights and work are split", columns, rows)


_STORED = (("dim ", "dim 0 over {axis}: the devices along {axis} hold a piece of dim 0 each."),)
_WORK = (
    ("repeated", "repeated: every device does all of it."),
    ("result dim ", "result dim {dim}: that dim of what the operator computes, counted from 0."),
    ("halo exchange", "halo exchange: each device has a range of positions, its neighbours send those beside it."),
    ("partial sums", "partial sums: each device works on its share of a sum that is added up later."),
    ("what it sums up", "what it sums up: each device adds up a part, the parts are added up later."),
    (" /", "a / b: several operators read the weight, some split as a, some as b."),
)
_TRAFFIC = (
    ("weight", "Sent, weight: the pieces that an operator needs are fetched for it."),
    ("gradient", "Sent, gradient: what devices found is added up, each keeps what it stores."),
)
_STATES = (
    "In JSON and --pin: S(d) split on dim d, R whole, B whole with gradients still to be added up, P value still "
    "to be added up; one for each axis."
)


def _explained(rows: list[WeightRow]) -> Iterator[str]:
    columns = (
        (_STORED, [r.stored for r in rows]),
        (_WORK, [r.work for r in rows]),
        (_TRAFFIC, [r.traffic for r in rows]),
    )
    for words, cells in columns:
        yield from (text for word, text in words if any(word in cell for cell in cells))


def legend(plan: Plan) -> Text:
    rows = rows_of(plan)
    dim = re.search(r"result dim (\d+)", " ".join(row.work for row in rows))
    words = [text.format(axis=",".join(plan.mesh["names"]), dim=dim[1] if dim else "") for text in _explained(rows)]
    words += ["= name: the same weight by another name."] if plan.tied else []
    held_up = 1 - plan.cluster.get("overlap", 1.0)
    if plan.seconds.get("hidden") and held_up > 0:
        words.append(f"Waited for: of what could hide, {held_up:.0%} is taken to hold computing up.")
    return Text(" ".join([*words, _STATES]), "dim")
