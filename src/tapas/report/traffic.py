"""What is sent: moves of tensors and the collectives inside operators, the longest first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from tapas.plan.plan import Move, Operator, Plan
from tapas.report import units
from tapas.report.frame import ROOMY, Cell, heading, line, table
from tapas.report.wiring import follows, structure_of_copy
from tapas.report.words import collective_inside, op_name, steps

SHOWN = 12


@dataclass(frozen=True)
class TrafficRow:
    block: str
    what: str
    forward: str
    backward: str
    nbytes: int  # of its largest message, 0 for what an operator sends inside
    sent_nbytes: int  # in a step, by all copies
    copies: int
    waited: float  # seconds a step, over all copies
    hidden: float


def label(plan: Plan, move: Move) -> str:
    """A weight by its name; an activation by the operator that made it, or that wants it."""
    if move.kind == "weight":
        return move.tensor
    maker = next((op for op in plan.operators if op.name == move.tensor and op.block == move.block), None)
    if maker is not None:
        return op_name(maker.module, maker.target) + _after(plan, maker, move)
    return f"{move.at} (input)" if move.at else "input"


def _after(plan: Plan, maker: Operator, move: Move) -> str:
    """` after k_proj`, where a module has several operators of a kind: which of them it is."""
    alike = [
        op for op in plan.operators if (op.block, op.module, op.target) == (maker.block, maker.module, maker.target)
    ]
    if maker.weights or len(alike) < 2 or move.copy < 0:
        return ""
    path = plan.assignment.structure.copies[move.copy].path
    here = maker.module.removeprefix(f"{maker.block}.") if path else maker.module
    names = [module.removeprefix(f"{here}.") for module in follows(structure_of_copy(plan, move.copy), move.source)]
    return f" after {names[0]}" if len(names) == 1 and names[0] else ""


def sent(plan: Plan) -> list[TrafficRow]:
    """Everything that takes time, the longest first."""
    passes = plan.source.get("accumulate", 1)
    found = [
        TrafficRow(m.block, label(plan, m), steps(m, "forward"), steps(m, "backward"), m.nbytes,
             passes * m.copies * m.sent_nbytes, m.copies, m.copies * m.seconds, m.copies * m.hidden)
        for m in plan.moves
    ]  # fmt: skip
    found = [s for s in found if s.forward or s.backward]
    for op in plan.operators:
        if op.communication or op.hidden:
            what, nbytes = f"inside {op_name(op.module, op.target)}", passes * op.copies * op.sent_nbytes
            seconds = op.copies * op.communication, op.copies * op.hidden
            found.append(TrafficRow(op.block, what, collective_inside(op), "", 0, nbytes, op.copies, *seconds))
    return sorted(found, key=lambda s: (-s.waited, -s.hidden))


def longest(plan: Plan) -> tuple[list[TrafficRow], list[TrafficRow]]:
    """Those that are shown, and the rest: which is never a single one."""
    everything = sent(plan)
    shown = SHOWN + (len(everything) == SHOWN + 1)
    return everything[:shown], everything[shown:]


def _row(s: TrafficRow, block: str) -> tuple[Cell, ...]:
    name = "  " + s.what.replace(f"{block}.", "", 1) if block else s.what
    return (name, s.forward, s.backward, _nbytes(s.nbytes), *_amounts([s]))


def _amounts(rows: Sequence[TrafficRow]) -> tuple[str, str, str]:
    waited, hidden = sum(s.waited for s in rows), sum(s.hidden for s in rows)
    return _nbytes(sum(s.sent_nbytes for s in rows)), units.seconds(waited), units.seconds(hidden) if hidden else ""


def _nbytes(amount: int) -> str:
    return units.nbytes(amount) if amount else ""


def _rows(plan: Plan) -> Iterable[tuple[Cell, ...]]:
    shown, rest = longest(plan)
    blocks: dict[str, list[TrafficRow]] = {}
    for s in shown:
        blocks.setdefault(s.block if s.copies > 1 else "", []).append(s)
    for block, rows in blocks.items():
        if block:
            yield heading(f"{block} × {rows[0].copies}", 7)
        yield from (_row(s, block) for s in rows)
    if rest:
        yield (f"and {len(rest)} more", "", "", "", *_amounts(rest))
    yield ("-",)
    yield tuple(line((text, "bold")) for text in ("total", "", "", "", *_amounts([*shown, *rest])))


def sent_table(plan: Plan, width: int) -> Table:
    """Where there is little room, messages need not be told."""
    columns = ("~tensor", "forward", "backward", ">message", ">in a step", ">waited for", ">hidden")
    rows: Iterable[tuple[Cell, ...]] = _rows(plan)
    if width < ROOMY:
        columns = (*columns[:3], *columns[4:])
        rows = ((_brief(row[0]), *row[1:3], *row[4:]) for row in rows)
    title = "What devices send each other (in a step: by all copies of a layer, on one device)"
    return table(title, columns, rows)


def _brief(name: Cell) -> Cell:
    return name.removesuffix(".weight") if isinstance(name, str) else name
