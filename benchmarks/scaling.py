"""How the time from a module to its plan grows: with depth, width, devices, axes and kinds of blocks.

The model is on the meta device and making it is not counted; everything `tapas.plan` does is. Beside it stands
plain `torch.export` of the same model, and AutoParallel where that is installed. Nothing here is stored but the
plot: every figure is measured in the run that prints it.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _autoparallel import missing, stages
from _plot import curves
from _timing import CLUSTER, Clock, in_turn, planned, timed, wanted
from rich.console import Console
from rich.table import Table
from torch import nn

import tapas
from tapas.capture import capture
from tapas.hardware.mesh import factorizations, parse_mesh
from tapas.models.load import LoadedModel, load
from tapas.planner.mesh_ranking import rank_meshes
from tapas.planner.request import Request
from tapas.util import paused

DEPTH_RATIO = 1.5  # from module to plan, many layers against few: every layer runs once, to be compared
EXPORT_SHARE = 1 / 2  # capture + fold + problem + search against torch.export alone
RANKING = 2.0  # all meshes of 64 devices, ranked, against one capture
MESH_RATIO = 5.0  # three axes, whatever the number of devices, against eight devices

LAYERS = {
    "llama3-8b": ("num_hidden_layers",),
    "gpt2": ("n_layer",),
    "t5-large": ("num_layers", "num_decoder_layers"),
    "mixtral-8x7b": ("num_hidden_layers",),
    "vit-h14": ("num_hidden_layers",),
}
DEPTHS = (4, 16, 64, 126, 1024)
FEW, MANY = 16, 126  # whose ratio is limited
EXPORTED = 64  # no deeper, for it would take minutes
WIDTHS = (1024, 2048, 4096, 8192, 16384)
MESHES = {  # by devices, then by axes
    8: ("8", "2x4", "2x2x2"),
    64: ("64", "8x8", "4x4x4"),
    1024: ("1024", "32x32", "8x16x8"),
    16384: ("16384", "128x128", "16x32x32"),
}
KINDS, COPIES = (1, 2, 4, 8), 16


@dataclass
class Run:
    console: Console
    rounds: int
    clock: Clock
    met: list[bool] = field(default_factory=list)

    def best(self, works: dict[Any, Callable[[], Any]]) -> dict[Any, float]:
        return in_turn(works, self.rounds, self.clock)

    def want(self, what: str, measured: float, limit: float) -> None:
        self.met.append(wanted(self.console, what, measured, limit))

    def show(self, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        table = Table(title=f"{title}: seconds{self.kind}, best of {self.rounds}")
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    @property
    def kind(self) -> str:
        return " of processor time" if self.clock is time.process_time else ""


def of_depth(model: str, layers: int, **settings: Any) -> LoadedModel:
    every = dict.fromkeys(LAYERS[model], layers) | settings
    return load(model, settings={name: str(value) for name, value in every.items()})


def planning(loaded: LoadedModel, mesh: str) -> Callable[[], Any]:
    return lambda: tapas.plan(loaded.model, loaded.inputs, mesh=mesh, memory=None)  # time, not fit


def exporting(loaded: LoadedModel) -> Callable[[], Any]:
    assert isinstance(loaded.inputs, dict)
    return partial(torch.export.export, loaded.model, (), loaded.inputs, strict=False)


def depth_table(models: list[str], depths: list[int], mesh: str, run: Run) -> dict[str, dict[int, float]]:
    """Seconds by depth, for each model and for torch.export of the first."""
    found: dict[str, dict[int, float]] = {model: {} for model in models}
    exported = f"torch.export, {models[0]}"
    for model in models:
        made = {layers: of_depth(model, layers) for layers in depths}
        works = {(model, layers): planning(loaded, mesh) for layers, loaded in made.items()}
        if model == models[0]:
            few = {layers: loaded for layers, loaded in made.items() if layers <= EXPORTED}
            works |= {(exported, layers): exporting(loaded) for layers, loaded in few.items()}
        for (name, layers), seconds in run.best(works).items():
            found.setdefault(name, {})[layers] = seconds
    ratios = {name: line[MANY] / line[FEW] for name, line in found.items() if {FEW, MANY} <= line.keys()}
    rows = [
        (
            name,
            *(f"{line[n]:.2f}" if n in line else "" for n in depths),
            f"{ratios[name]:.2f}" if name in ratios else "",
        )
        for name, line in found.items()
    ]
    columns = ("layers", *(f"{n:,}" for n in depths), f"{MANY:,} / {FEW}")
    run.show(f"Module to plan on {mesh}, by depth", columns, rows)
    for name, ratio in ratios.items():
        run.want(f"{name}: {MANY:,} layers / {FEW} layers", ratio, DEPTH_RATIO)
    run.console.print()
    return found


def export_table(model: str, mesh: str, run: Run) -> None:
    """Stage by stage, one model as it is published."""
    loaded = load(model)
    parts: list[tuple[float, ...]] = []
    whole: list[float] = []
    export: list[float] = []
    for _ in range(run.rounds):
        export.append(timed(exporting(loaded), run.clock)[0])
        capturing, graph = timed(lambda: capture(loaded.model, loaded.inputs, name=model), run.clock)
        parts.append((capturing, *planned(graph, mesh, run.clock)[0]))
        whole.append(timed(planning(loaded, mesh), run.clock)[0])
    best = min(parts, key=sum)
    names = ("torch.export", "capture", "fold", "problem", "search", "capture to search", "tapas.plan")
    row = tuple(f"{seconds:.3f}" for seconds in (min(export), *best, sum(best), min(whole)))
    run.show(f"{model} on {mesh}, beside torch.export of it", names, [row])
    run.want("capture, fold, problem and search / torch.export", sum(best) / min(export), EXPORT_SHARE)
    run.console.print(f"tapas.plan, which also compares with known strategies: {min(whole) / min(export):.3g}\n")
    beside(loaded, mesh, min(whole), run)


def beside(loaded: LoadedModel, mesh: str, mine: float, run: Run) -> None:
    reason = missing()
    if reason:
        run.console.print(f"AutoParallel is not compared: {reason}\n", markup=False)
        return
    assert isinstance(loaded.inputs, dict)
    found = stages(loaded.model, loaded.inputs, parse_mesh(mesh).sizes, run.clock)
    if isinstance(found, str):
        run.console.print(f"AutoParallel is not compared, it failed: {found}\n", markup=False)
        return
    total = sum(found.values())
    table = Table(title=f"{loaded.name} on {mesh}, beside AutoParallel (once): seconds{run.kind}")
    for column in ("", *found, "total", "/ tapas.plan"):
        table.add_column(column, justify="right")
    table.add_row("AutoParallel", *(f"{s:.2f}" for s in found.values()), f"{total:.2f}", f"{total / mine:.1f}")
    table.add_row("tapas.plan", *[""] * len(found), f"{mine:.2f}", "1")
    run.console.print(table)


def width_table(model: str, layers: int, mesh: str, run: Run) -> None:
    made = {n: of_depth(model, layers, hidden_size=n, intermediate_size=7 * n // 2) for n in WIDTHS}
    best = run.best({n: planning(loaded, mesh) for n, loaded in made.items()})
    row = ("module to plan", *(f"{best[n]:.2f}" for n in WIDTHS))
    run.show(f"{model} with {layers} layers on {mesh}, by width", ("hidden size", *(f"{n:,}" for n in WIDTHS)), [row])
    run.console.print()


def mesh_table(model: str, run: Run) -> None:
    """The batch is as large as the largest mesh: every mesh could split it over all of its devices."""
    loaded = load(model, batch=max(MESHES))
    best = run.best({mesh: planning(loaded, mesh) for meshes in MESHES.values() for mesh in meshes})
    base = best["8"]
    rows = [
        (f"{devices:,}", *(f"{mesh}: {best[mesh]:.2f} ({best[mesh] / base:.1f})" for mesh in meshes))
        for devices, meshes in MESHES.items()
    ]
    columns = ("devices", "1 axis (/ that of 8)", "2 axes", "3 axes")
    run.show(f"{model}, global batch {max(MESHES):,}, by mesh", columns, rows)
    most = max(best[meshes[-1]] for meshes in MESHES.values())
    run.want(f"three axes, up to {max(MESHES):,} devices / 8 devices", most / base, MESH_RATIO)
    run.console.print()


def ranking_table(model: str, devices: int, run: Run) -> None:
    """All meshes ranked, without the search of the best one in full, beside one capture of the model."""
    loaded, meshes, request = load(model), factorizations(devices), Request.of(str(devices), CLUSTER)
    graph = capture(loaded.model, loaded.inputs, name=model)
    best = run.best(
        {
            "torch.export": exporting(loaded),
            "capture": lambda: capture(loaded.model, loaded.inputs, name=model),
            "ranking": lambda: paused(rank_meshes)(graph, meshes, request),
        }
    )
    ratios = [best["ranking"] / best[other] for other in ("torch.export", "capture")]
    columns = (*best, "ranking / torch.export", "ranking / capture")
    row = (*(f"{seconds:.3f}" for seconds in best.values()), *(f"{ratio:.2f}" for ratio in ratios))
    run.show(f"{model}: the {len(meshes)} meshes of {devices} devices, ranked", columns, [row])
    run.want(f"ranking {len(meshes)} meshes / capture", ratios[1], RANKING)
    run.console.print()


class Kinds(nn.Module):
    """Transformer layers of several kinds, `COPIES` of each in a row."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(1024, 16, 1024 * (2 + kind), 0.0, batch_first=True, norm_first=True)
            for kind in range(kinds)
            for _ in range(COPIES)
        )

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, target)


def kinds_table(mesh: str, run: Run) -> None:
    with torch.device("meta"):
        made = {kinds: Kinds(kinds) for kinds in KINDS}
        inputs = {name: torch.zeros(64, 512, 1024) for name in ("x", "target")}
    best = run.best({n: partial(tapas.plan, model, inputs, mesh=mesh) for n, model in made.items()})
    rows = [
        ("module to plan", *(f"{best[n]:.2f}" for n in KINDS)),
        ("for each kind", *(f"{best[n] / n:.2f}" for n in KINDS)),
    ]
    title = f"Transformer layers, {COPIES} copies of each kind, on {mesh}, by kinds"
    run.show(title, ("kinds", *map(str, KINDS)), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=list(LAYERS), help="those of the depth table")
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="processor time, for a machine that others use as well")
    parser.add_argument("--plot", type=Path, default=Path(__file__).with_suffix(".svg"))
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    run = Run(console, given.rounds, time.process_time if given.cpu else time.perf_counter)
    first = of_depth("llama3-8b", 2)  # imports and first calls are nobody's time
    planning(first, "8")()
    exporting(first)()
    for table in given.tables:
        TABLES[table](given, run)
    if not all(run.met):
        console.print("planning took longer than wanted (see above)")
    return 0 if all(run.met) else 1


def depth(given: argparse.Namespace, run: Run) -> None:
    found = depth_table(given.models, sorted(given.depths), "8", run)
    exported = next((name for name in found if name.startswith("torch.export")), "")
    given.plot.write_text(curves("From module to plan", "layers", f"seconds{run.kind}", found, dashed=exported))
    run.console.print(f"plot: {given.plot}\n", soft_wrap=True)


TABLES: dict[str, Callable[[argparse.Namespace, Run], None]] = {
    "depth": depth,
    "export": lambda _, run: export_table("llama3-8b", "8x8", run),
    "width": lambda _, run: width_table("llama3-8b", FEW, "8", run),
    "mesh": lambda _, run: mesh_table("llama3-8b", run),
    "meshes": lambda _, run: ranking_table("llama3-70b", 64, run),
    "kinds": lambda _, run: kinds_table("8", run),
}


if __name__ == "__main__":
    sys.exit(main())
