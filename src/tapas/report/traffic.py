"""What is sent: moves of tensors and the collectives inside operators, the longest first."""

from collections.abc import Iterable
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
    nbytes: float
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
    found = [
        TrafficRow(m.block, label(plan, m), steps(m, "forward"), steps(m, "backward"), m.nbytes, m.copies,
             m.copies * m.seconds, m.copies * m.hidden)
        for m in plan.moves
    ]  # fmt: skip
    found = [s for s in found if s.forward or s.backward]
    for op in plan.operators:
        if op.communication:
            what, seconds = f"inside {op_name(op.module, op.target)}", op.copies * op.communication
            found.append(TrafficRow(op.block, what, collective_inside(op), "", 0, op.copies, seconds, 0.0))
    return sorted(found, key=lambda s: (-s.waited, -s.hidden))


def _row(s: TrafficRow, block: str) -> tuple[Cell, ...]:
    name = "  " + s.what.replace(f"{block}.", "", 1) if block else s.what
    size = units.nbytes(s.nbytes) if s.nbytes else ""
    return (name, s.forward, s.backward, size, units.seconds(s.waited), units.seconds(s.hidden) if s.hidden else "")


def _rows(plan: Plan) -> Iterable[tuple[Cell, ...]]:
    everything = sent(plan)
    blocks: dict[str, list[TrafficRow]] = {}
    for s in everything[:SHOWN]:
        blocks.setdefault(s.block if s.copies > 1 else "", []).append(s)
    for block, rows in blocks.items():
        if block:
            yield heading(f"{block} × {rows[0].copies}", 6)
        yield from (_row(s, block) for s in rows)
    rest = everything[SHOWN:]
    if rest:
        waited, hidden = sum(s.waited for s in rest), sum(s.hidden for s in rest)
        yield (f"and {len(rest)} more", "", "", "", units.seconds(waited), units.seconds(hidden))
    total, hidden = sum(s.waited for s in everything), sum(s.hidden for s in everything)
    yield ("-",)
    yield (line(("total", "bold")), "", "", "", line((units.seconds(total), "bold")), units.seconds(hidden))


def sent_table(plan: Plan, width: int) -> Table:
    columns = ("~tensor", "forward", "backward", ">size", ">waited for", ">hidden")
    rows: Iterable[tuple[Cell, ...]] = _rows(plan)
    if width < ROOMY:
        rows = ((row[0].removesuffix(".weight") if isinstance(row[0], str) else row[0], *row[1:]) for row in rows)
    return table("What devices send each other in a step (seconds of all copies, sizes of one message)", columns, rows)
