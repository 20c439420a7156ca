"""The trade-off between step time and memory as a page."""

from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tapas.planner.frontier import Frontier, FrontierPoint
from tapas.report import units
from tapas.report.frame import Sized, line, page, table
from tapas.report.plan import ROOMY, header

BAR = 8  # columns
KNEE = "◆"


def frontier_page(curve: Frontier, folder: Path | None = None) -> Group:
    made = Sized(lambda width: points_table(curve, width))
    return page((header(curve.points[0].plan), made, notes(curve, folder)))


def points_table(curve: Frontier, width: int) -> Table:
    bars = width >= ROOMY
    largest = max(point.nbytes for point in curve.points)
    rows = [
        (
            KNEE if point.knee else "", units.nbytes(point.nbytes),
            *([units.bar(point.nbytes / largest, BAR)] if bars else []),
            line((units.seconds(point.seconds), "bold green" if curve.fits(point) else "")), slower(curve, point),
            units.percent(point.gap), recomputed(point), units.percent(point.stored),
            "yes" if curve.fits(point) else "no",
        )
        for point in curve.points
    ]  # fmt: skip
    columns = ("!", ">memory", *(["!"] if bars else []), ">step time", ">than fastest", ">gap", "computed again")
    return table("Step time against memory per device", (*columns, ">weights", "!fits"), rows)


def slower(curve: Frontier, point: FrontierPoint) -> str:
    return "fastest" if point is curve.points[-1] else units.slower(1 + curve.slower(point))


def recomputed(point: FrontierPoint) -> str:
    """`12 of 32 blocks, 4 all but products`."""
    partly = point.recomputed("selective")
    count = partly + point.recomputed("block")
    if not count:
        return "nothing"
    how = "" if not partly else ", all but products" if partly == count else f", {partly} all but products"
    return f"{count} of {units.many(point.blocks, 'block')}{how}"


def notes(curve: Frontier, folder: Path | None) -> Text:
    device = curve.points[0].plan.cluster["device"]
    lines = [
        line((KNEE, "bold"), " knee: no mixture of two other points is both smaller and faster"),
        line("gap: how much faster a plan of this memory might be at most (each search is a short one)"),
        line("weights: the part of all weights that each device stores"),
        line(
            f"fits: of the {units.nbytes(device['memory_bytes'])} of {device['name']}",
            f" a plan may use {units.nbytes(curve.usable)}",
        ),
    ]
    if folder is not None:
        lines.append(line(f"The knees{_and_device(curve)} are in {folder}: ", ", ".join(curve.files)))
    return Text("\n").join(lines)


def _and_device(curve: Frontier) -> str:
    best = curve.fitting
    return "" if best is None or best.knee else " and the fastest plan that fits"
