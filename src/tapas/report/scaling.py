"""A sweep over numbers of devices: a table, and the speed-ups as bars."""

from collections.abc import Sequence
from math import log2

from rich.console import Group
from rich.table import Table

from tapas.planner.device_sweep import ScalingPoint
from tapas.report import units
from tapas.report.frame import line, page, table

BAR = 40  # columns for the largest number of devices


def scaling_table(rows: Sequence[ScalingPoint]) -> Table:
    cells = []
    for row in rows:
        best = row.best
        memory = units.nbytes(best.nbytes) if best.nbytes else ""
        if best.cost is None or row.speedup is None or row.efficiency is None:
            cells.append((str(row.devices), str(best.mesh), "–", "", "", memory, best.why))
            continue
        figures = units.seconds(best.cost), f"{row.speedup:.3g}", units.percent(row.efficiency)
        cells.append((str(row.devices), str(best.mesh), *figures, memory, " | ".join(best.axes)))
    columns = (">devices", "!best mesh", ">step time", ">speed-up", ">efficiency", ">memory", "what each axis splits")
    return table("The best mesh for each number of devices, the same batch on all", columns, cells)


def scaling_bars(rows: Sequence[ScalingPoint]) -> Table | None:
    """Bars on a scale of powers of two, as devices are: a full one is as fast as so many devices can be."""
    known = [row for row in rows if row.speedup]
    if len(known) < 2:
        return None
    first = known[0].devices
    most = log2(2 * known[-1].devices / first)
    cells = []
    for row in known:
        assert row.speedup is not None
        ideal = round(BAR * log2(2 * row.devices / first) / most)
        reached = max(0, round(BAR * log2(2 * row.speedup) / most)) if row.speedup > 0.5 else 0
        cells.append((str(row.devices), "█" * reached + "░" * max(0, ideal - reached), f"{row.speedup:.3g}"))
    return table("Speed-up █, and what more it could be ░ (log scale)", (">devices", "!", ">times"), cells)


def scaling_page(rows: Sequence[ScalingPoint], plot: str = "") -> Group:
    note = "By the best plan that a quick search found for each mesh; `tapas plan --devices` searches one in full."
    return page(
        (scaling_table(rows), scaling_bars(rows), line(note), line(f"Plot written to {plot}") if plot else None)
    )
