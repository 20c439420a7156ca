"""A sweep as a picture: speed-up over devices, beside what would be ideal."""

from collections.abc import Sequence
from pathlib import Path

from tapas.planner.device_sweep import ScalingPoint
from tapas.report.pictures import save_picture


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
