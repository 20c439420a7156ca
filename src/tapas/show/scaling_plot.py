"""A sweep as a picture: speed-up over devices, beside what would be ideal. The only user of matplotlib here."""

from collections.abc import Sequence
from pathlib import Path

from tapas.errors import TapasError
from tapas.plans import check_target
from tapas.scaling import Scaled

SUFFIXES = (".svg", ".png")


def check_plot(path: Path) -> None:
    """Refuse what cannot be drawn before any work is done for it."""
    if path.suffix.lower() not in SUFFIXES:
        raise TapasError(f"--plot {path}", "is no picture that can be written", "end its name with .svg or .png")
    check_target(path)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        remedy = "pip install 'tapas-parallel[plot]', or leave --plot out"
        raise TapasError(f"--plot {path}", "matplotlib is not installed", remedy) from None


def draw_scaling(rows: Sequence[Scaled], path: Path, title: str) -> None:
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
    # the same sweep gives the same file: no date, and names that do not depend on chance
    same = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "tapas"}):
        figure.savefig(path, dpi=150, metadata=same)
