"""The trade-off between step time and memory, as a page and as a picture."""

from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tapas.planner.frontier import Frontier, FrontierPoint
from tapas.report import units
from tapas.report.frame import FitToWidth, line, page, table
from tapas.report.pictures import check_plot, save_picture
from tapas.report.plan import ROOMY, header
from tapas.report.words import mesh_text

BAR_COLUMNS = 8  # columns
KNEE = "◆"


def frontier_page(curve: Frontier, folder: Path | None = None) -> Group:
    made = FitToWidth(lambda width: points_table(curve, width))
    return page((header(curve.points[0].plan), made, notes(curve, folder)))


def points_table(curve: Frontier, width: int) -> Table:
    bars = width >= ROOMY
    largest = max(point.nbytes for point in curve.points)
    rows = [
        (
            KNEE if point.knee else "", units.nbytes(point.nbytes),
            *([units.bar(point.nbytes / largest, BAR_COLUMNS)] if bars else []),
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


INCHES = (7.5, 4.5)
POINT, BOUND, DEVICE = "#1f5fa8", "#8fb3d9", "#b3452c"
ROOM = 1.6  # the device is drawn where the largest plan needs at least its memory divided by this


def draw_frontier(curve: Frontier, path: Path) -> None:
    check_plot(path)
    save_picture(frontier_figure(curve), path)


def frontier_figure(curve: Frontier):
    from matplotlib.figure import Figure

    made = Figure(figsize=INCHES, layout="constrained")
    axes: Any = made.add_subplot()
    byte, byte_name = _unit([p.nbytes for p in curve.points], units.BYTES)
    second, second_name = _unit([p.seconds for p in curve.points], units.TIME)
    memory = [p.nbytes / byte for p in curve.points]
    seconds = [p.seconds / second for p in curve.points]
    bounds = [p.plan.bound / second for p in curve.points]
    axes.step(memory, seconds, where="post", color=BOUND, linewidth=1, label="fastest plan found within this memory")
    axes.vlines(memory, bounds, seconds, color=POINT, linewidth=1, label="down to the bound: no plan is below")
    _points(axes, curve, memory, seconds)
    _device(axes, curve, byte)
    first = curve.points[0].plan
    step = "training step" if first.training else "inference"
    axes.set_title(f"{first.model}, {step}, {mesh_text(first)} of {first.cluster['device']['name']}", fontsize=11)
    axes.set_xlabel(f"memory per device ({byte_name})")
    axes.set_ylabel(f"step time ({second_name})")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.margins(0.06, 0.12)
    axes.legend(frameon=False, fontsize=8.5)
    return made


def _points(axes: Any, curve: Frontier, memory: list[float], seconds: list[float]) -> None:
    corners = [i for i, p in enumerate(curve.points) if p.knee]
    others = [i for i, p in enumerate(curve.points) if not p.knee]
    at = [memory[i] for i in corners], [seconds[i] for i in corners]
    axes.plot(*at, "--", color=POINT, linewidth=1, alpha=0.7)
    axes.plot(*at, "D", color=POINT, markersize=6, label="knees")
    if others:
        axes.plot(
            [memory[i] for i in others], [seconds[i] for i in others], "o", markersize=5, markerfacecolor="white",
            markeredgecolor=POINT, label="other plans",
        )  # fmt: skip
    for i in corners[:-1]:
        text = f"+{curve.slower(curve.points[i]):.0%}"
        axes.annotate(text, (memory[i], seconds[i]), (5, 6), textcoords="offset points", fontsize=8.5, color=POINT)


def _device(axes: Any, curve: Frontier, byte: float) -> None:
    """What a plan may use of the device; left out where that is far to the right of all plans."""
    largest, device = max(p.nbytes for p in curve.points), curve.points[0].plan.cluster["device"]
    if curve.usable > ROOM * largest:
        return
    label = f"{units.nbytes(curve.usable)} of {device['name']}"
    axes.axvline(curve.usable / byte, color=DEVICE, linewidth=1.2, linestyle=":", label=label)


def _unit(values: list[float] | list[int], known: units.Units) -> tuple[float, str]:
    return next((u for u in known if max(values) >= u[0]), known[-1])
