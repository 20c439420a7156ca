"""Planned against measured."""

from collections.abc import Callable

from rich.console import Group

from tapas.report import units
from tapas.report.frame import line, page, table
from tapas.verify.validation import PACKING, Row, Validation

MASTER = "The plan counts a copy of weights in float32 for the optimizer, which torch's AdamW has not: see --no-master."
SHOWN = 0.005  # of all that was measured: less is not worth a line


def validation_page(found: Validation) -> Group:
    whole = [_cells(row, units.seconds) for row in (found.passes, found.update)]
    whole.append(_cells(found.memory, units.nbytes))
    columns = ("!", ">planned", ">measured", ">planned / measured")
    return page(
        (
            line(
                (found.model, "bold"), f": the first rank of {found.mesh} on {found.device}, against the figures of"
                f" {found.cluster}. Nothing was sent: what is waited for on links is in neither column.",
            ),
            table("Rank 0", columns, whole),
            table("By family of operators (one step, with a profiler)", columns, _shown(found.families)),
            table("By place in the model", columns, _shown(found.places)),
            *([line(MASTER)] if found.copied else ()),
            line(f"{PACKING.capitalize()}: around collectives; the plan counts them with what is sent."),
        )
    )  # fmt: skip


def _shown(rows: tuple[Row, ...]) -> list[tuple[str, ...]]:
    total = max(sum(row.measured for row in rows), sum(row.planned for row in rows))
    return [_cells(row, units.seconds) for row in rows if max(row.planned, row.measured) >= SHOWN * total]


def _cells(row: Row, unit: Callable[[float], str]) -> tuple[str, ...]:
    ratio = f"{row.planned / row.measured:.2f}" if row.planned and row.measured else ""
    return row.name, unit(row.planned), unit(row.measured), ratio
