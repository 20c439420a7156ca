"""What was measured of a device, and how well the cost model says it again."""

from pathlib import Path
from typing import Any

from rich.console import Group

from tapas.calibrate.fit import Sample
from tapas.calibrate.links import MeasuredLink
from tapas.calibrate.profile import Profile
from tapas.hardware.cluster import COLLECTIVES
from tapas.hardware.cluster_files import cluster_to_dict
from tapas.report import units
from tapas.report.frame import line, page, table
from tapas.report.pictures import save_picture

LINKS = {"intra": "within a node", "inter": "between nodes"}
COLUMNS = 4  # of plots


def calibration_page(found: Profile) -> Group:
    cluster = found.cluster
    device = cluster.device
    peaks = ", ".join(f"{dtype} {rate / 1e12:.3g}" for dtype, rate in device.flops_per_s)
    rows = []
    for fit in found.fits:
        figures = ", ".join(f"{key} {value:.3g}" for key, value in device.family(fit.family).figures().items())
        rows.append((fit.family, str(fit.samples), f"{fit.typical:.0%}", f"{fit.worst:.0%}", figures))
    parts: list[Any] = [
        line((device.name, "bold"), f", {units.nbytes(device.memory_bytes)}: {peaks} TFLOPS,"
             f" {device.memory_bytes_per_s / 1e9:.4g} GB/s, shortest kernel {units.seconds(device.launch_seconds)}"),
        table(
            "Families of operators: how far the model is from what was measured",
            ("!family", ">probes", ">median", ">worst", "shares of the peaks"), rows,
        ),
    ]  # fmt: skip
    parts += [_link_table(LINKS[key], measured) for key, measured in found.links.items()]
    if found.links:
        parts.append(line(f"Computing while sending: {cluster.overlap:.0%} of what is sent holds nothing up"))
    parts += [line(("Not measured: ", "bold"), text) for text in found.unmeasured]
    parts.append(line(f"One and the same product differed by {found.spread:.0%} over the time that this took"))
    return page(tuple(parts))


def _link_table(name: str, found: MeasuredLink) -> Any:
    rows = []
    for kind in COLLECTIVES:
        some = found.of(kind)
        small, large = some[0], some[-1]
        cells = (units.seconds(small.seconds), units.seconds(large.seconds), f"{found.typical(kind):.0%}")
        rows.append(
            (kind.replace("_", "-"), units.nbytes(small.nbytes), cells[0], units.nbytes(large.nbytes), *cells[1:])
        )
    link = found.link
    title = (
        f"Collectives {name}, {found.size} ranks: {link.bytes_per_s / 1e9:.3g} GB/s,"
        f" {units.seconds(link.latency_seconds)} a step; what these two miss is written down by size"
    )
    return table(title, ("!collective", ">smallest", ">", ">largest", ">", ">off, median"), rows)


def calibration_dict(found: Profile) -> dict[str, Any]:
    device = found.cluster.device
    return {
        "cluster": cluster_to_dict(found.cluster),
        "spread": found.spread,
        "fits": [{"family": f.family, "probes": f.samples, "median": f.typical, "worst": f.worst} for f in found.fits],
        "probes": [
            {"family": s.family, "name": s.title, "measured": [s.forward, s.backward], "fitted": s.predicted(device)}
            for s in found.samples
        ],
        "links": {key: _messages(measured) for key, measured in found.links.items()},
        "unmeasured": list(found.unmeasured),
    }  # fmt: skip


def _messages(found: MeasuredLink) -> list[dict[str, Any]]:
    return [
        {"kind": m.kind, "bytes": m.nbytes, "measured": m.seconds, "fitted": found.predicted(m)} for m in found.messages
    ]


def draw_calibration(found: Profile, path: Path) -> None:
    """A plot for each family and link: fitted against measured seconds; on the line they are equal."""
    from matplotlib.figure import Figure

    device, plots = found.cluster.device, dict[str, list[tuple[float, float]]]()
    for sample in found.samples:
        plots.setdefault(sample.family, []).extend(_points(sample, device))
    for key, measured in found.links.items():
        plots[f"collectives {LINKS[key]}"] = [(m.seconds, measured.predicted(m)) for m in measured.messages]
    rows = -(-len(plots) // COLUMNS)
    made = Figure(figsize=(3 * COLUMNS, 2.8 * rows), layout="constrained")
    grid = list(made.subplots(rows, COLUMNS, squeeze=False).flat)
    for axes, (name, points) in zip(grid, plots.items(), strict=False):
        axes.loglog(*zip(*points, strict=True), "o", markersize=4, alpha=0.7)
        ends = [min(map(min, points)), max(map(max, points))]
        axes.loglog(ends, ends, "-", color="0.6", linewidth=1)
        axes.set_title(name, fontsize=9)
    for axes in grid[len(plots) :]:
        axes.set_visible(False)
    made.supxlabel("measured seconds")
    made.supylabel("seconds by the cost model")
    save_picture(made, path)


def _points(sample: Sample, device: Any) -> list[tuple[float, float]]:
    return [pair for pair in zip((sample.forward, sample.backward), sample.predicted(device), strict=True) if pair[1]]
