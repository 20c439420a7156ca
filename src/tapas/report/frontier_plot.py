"""The trade-off between step time and memory as a picture."""

from pathlib import Path
from typing import Any

from tapas.planner.frontier import Frontier
from tapas.report import units
from tapas.report.pictures import check_plot, save_picture
from tapas.report.words import mesh_text

INCHES = (7.5, 4.5)
POINT, BOUND, DEVICE = "#1f5fa8", "#8fb3d9", "#b3452c"
ROOM = 1.6  # the device is drawn where the largest plan needs at least its memory divided by this


def save_plot(curve: Frontier, path: Path) -> None:
    check_plot(path)
    save_picture(figure(curve), path)


def figure(curve: Frontier):
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
