"""Meshes, ranked: above the plan for the best of them; and the best of each number of devices, as table and picture."""

from collections.abc import Sequence
from math import log2
from pathlib import Path

from rich.console import Group
from rich.table import Table

from tapas.plan.plan import Plan
from tapas.planner.device_sweep import ScalingPoint
from tapas.planner.mesh_ranking import RankedMesh
from tapas.report import units
from tapas.report.frame import line, page, table
from tapas.report.pictures import save_picture

NOTE = (
    "Ranked by the best plan that a quick search found for each; the first mesh was then searched in full, with proof."
)


def meshes_table(rows: Sequence[RankedMesh], plan: Plan) -> Table:
    """The best mesh as it was planned in the end, the others as they were found."""
    cells = []
    for number, row in enumerate(rows):
        memory = units.nbytes(row.nbytes) if row.nbytes else ""
        cost = plan.cost if number == 0 else row.cost
        if cost is None:
            cells.append((str(row.mesh), "–", "", memory, "", row.why))
            continue
        ratio = "" if number == 0 else units.slower(cost / plan.cost if plan.cost else 1.0)
        proof = plan.proof if number == 0 else "found"
        memory = units.nbytes(sum(plan.memory.values())) if number == 0 else memory
        cells.append((str(row.mesh), units.seconds(cost), ratio, memory, proof, _axes(row)))
    title = f"Meshes of {units.many(rows[0].mesh.devices, 'device')}, outermost axis first: {len(rows)} in all"
    columns = ("!mesh", ">step time", "!than the best", ">memory", "!proof", "what each axis splits")
    return table(title, columns, cells)


def _axes(row: RankedMesh) -> str:
    return " | ".join(row.axes)


def with_meshes(rows: Sequence[RankedMesh], plan: Plan, below: Group) -> Group:
    """The ranking, where there is one, above the plan."""
    return page((meshes_table(rows, plan), line(NOTE), below)) if rows else below


BAR_COLUMNS = 40  # columns for the largest number of devices


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
        ideal = round(BAR_COLUMNS * log2(2 * row.devices / first) / most)
        reached = max(0, round(BAR_COLUMNS * log2(2 * row.speedup) / most)) if row.speedup > 0.5 else 0
        cells.append((str(row.devices), "█" * reached + "░" * max(0, ideal - reached), f"{row.speedup:.3g}"))
    return table("Speed-up █, and what more it could be ░ (log scale)", (">devices", "!", ">times"), cells)


def scaling_page(rows: Sequence[ScalingPoint], plot: str = "") -> Group:
    note = "By the best plan that a quick search found for each mesh; `tapas plan --devices` searches one in full."
    return page(
        (scaling_table(rows), scaling_bars(rows), line(note), line(f"Plot written to {plot}") if plot else None)
    )


def draw_scaling(rows: Sequence[ScalingPoint], path: Path, title: str) -> None:
    from matplotlib.figure import Figure  # without pyplot: no window, no state

    known = [(row.best.mesh, row.speedup) for row in rows if row.speedup is not None]
    devices = [mesh.devices for mesh, _ in known]
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(devices, [n / devices[0] for n in devices], "--", color="0.6", label="ideal")
    axes.plot(devices, [speedup for _, speedup in known], "o-", color="C0", label="best mesh")
    for mesh, speedup in known:
        where = {"xytext": (0, -14), "textcoords": "offset points", "ha": "center"}
        axes.annotate(str(mesh), (mesh.devices, speedup), fontsize=8, **where)
    axes.margins(0.08, 0.12)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(devices, [str(n) for n in devices], minor=False)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("devices")
    axes.set_ylabel(f"speed-up over {devices[0]} devices" if devices[0] > 1 else "speed-up over one device")
    axes.set_title(title, fontsize=10)
    axes.grid(True, alpha=0.3)
    axes.legend(frameon=False)
    save_picture(figure, path)
