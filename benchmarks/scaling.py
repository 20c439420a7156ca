"""How the time from a module to its plan grows: with depth, width, devices, axes and kinds of blocks.

The model is on the meta device and making it is not counted; everything `tapas.plan` does is. Beside it stands
plain `torch.export` of the same model. Figures are those of the best round, with the worst one in brackets.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _results import Results, parser_for
from _timing import CLUSTER, Clock, in_turn, planned, span, timed
from torch import nn

import tapas
from tapas.capture import capture
from tapas.hardware.mesh import factorizations
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
AXES = (1, 2, 3)
KINDS, COPIES = (1, 2, 4, 8), 16


@dataclass
class Run:
    out: Results
    rounds: int
    clock: Clock

    def rounds_of(self, works: dict[Any, Callable[[], Any]]) -> dict[Any, list[float]]:
        return in_turn(works, self.rounds, self.clock)

    def show(self, name: str, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        which = f"best (worst) of {self.rounds} rounds" if self.rounds > 1 else "once"
        self.out.table(name, f"{title}: seconds{self.kind}, {which}", columns, rows)

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


def depth_table(models: list[str], depths: list[int], mesh: str, run: Run) -> None:
    """Seconds by depth, for each model and for torch.export of the first."""
    seconds: dict[str, dict[int, list[float]]] = {model: {} for model in models}
    exported = f"torch.export, {models[0]}"
    for model in models:
        made = {layers: of_depth(model, layers) for layers in depths}
        works = {(model, layers): planning(loaded, mesh) for layers, loaded in made.items()}
        if model == models[0]:
            few = {layers: loaded for layers, loaded in made.items() if layers <= EXPORTED}
            works |= {(exported, layers): exporting(loaded) for layers, loaded in few.items()}
        for (name, layers), rounds in run.rounds_of(works).items():
            seconds.setdefault(name, {})[layers] = rounds
    lines = {name: {layers: min(rounds) for layers, rounds in line.items()} for name, line in seconds.items()}
    ratios = {name: line[MANY] / line[FEW] for name, line in lines.items() if {FEW, MANY} <= line.keys()}
    rows = [
        (name, *(span(line[n]) if n in line else "" for n in depths), f"{ratios[name]:.2f}" if name in ratios else "")
        for name, line in seconds.items()
    ]
    columns = ("layers", *(f"{n:,}" for n in depths), f"{MANY:,} / {FEW}")
    run.show("depth", f"Module to plan on {mesh}, by depth", columns, rows)
    run.out.curves("depth", "From module to plan", "layers", f"seconds{run.kind}", lines, dashed=exported)
    for name, ratio in ratios.items():
        run.out.want(f"{name}: {MANY:,} layers / {FEW} layers", ratio, DEPTH_RATIO)


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
    names = ("model", "torch.export", "capture", "fold", "problem", "search", "capture to search", "tapas.plan")
    stages = [list(rounds) for rounds in zip(*parts, strict=True)]
    sums = [sum(part) for part in parts]
    row = (model, *(span(rounds, 3) for rounds in (export, *stages, sums, whole)))
    run.show("export", f"{model} on {mesh}, beside torch.export of it", names, [row])
    run.out.want("capture, fold, problem and search / torch.export", min(sums) / min(export), EXPORT_SHARE)
    run.out.console.print(f"tapas.plan, which also compares with known strategies: {min(whole) / min(export):.3g}")


def width_table(model: str, layers: int, mesh: str, run: Run) -> None:
    made = {n: of_depth(model, layers, hidden_size=n, intermediate_size=7 * n // 2) for n in WIDTHS}
    seconds = run.rounds_of({n: planning(loaded, mesh) for n, loaded in made.items()})
    row = ("module to plan", *(span(seconds[n]) for n in WIDTHS))
    columns = ("hidden size", *(f"{n:,}" for n in WIDTHS))
    run.show("width", f"{model} with {layers} layers on {mesh}, by width", columns, [row])


def mesh_table(model: str, run: Run) -> None:
    """The batch is as large as the largest mesh: every mesh could split it over all of its devices."""
    loaded = load(model, batch=max(MESHES))
    seconds = run.rounds_of({mesh: planning(loaded, mesh) for meshes in MESHES.values() for mesh in meshes})
    base = min(seconds["8"])
    rows = [
        (f"{devices:,}", *(f"{mesh}: {span(seconds[mesh])}" for mesh in meshes)) for devices, meshes in MESHES.items()
    ]
    run.show("mesh", f"{model}, global batch {max(MESHES):,}, by mesh", ("devices", "1 axis", "2 axes", "3 axes"), rows)
    axes = {f"{n} {'axis' if n == 1 else 'axes'}": {d: min(seconds[m[n - 1]]) for d, m in MESHES.items()} for n in AXES}
    run.out.curves("mesh", f"{model} by mesh", "devices", f"seconds{run.kind}", axes)
    most = max(min(seconds[meshes[-1]]) for meshes in MESHES.values())
    run.out.want(f"three axes, up to {max(MESHES):,} devices / 8 devices", most / base, MESH_RATIO)


def ranking_table(model: str, devices: int, run: Run) -> None:
    """All meshes ranked, without the search of the best one in full, beside one capture of the model."""
    loaded, meshes, request = load(model), factorizations(devices), Request.of(str(devices), CLUSTER)
    graph = capture(loaded.model, loaded.inputs, name=model)
    seconds = run.rounds_of(
        {
            "torch.export": exporting(loaded),
            "capture": lambda: capture(loaded.model, loaded.inputs, name=model),
            "ranking": lambda: paused(rank_meshes)(graph, meshes, request),
        }
    )
    ratios = [min(seconds["ranking"]) / min(seconds[other]) for other in ("torch.export", "capture")]
    columns = ("model", *seconds, "ranking / torch.export", "ranking / capture")
    row = (model, *(span(rounds, 3) for rounds in seconds.values()), *(f"{ratio:.2f}" for ratio in ratios))
    run.show("meshes", f"{model}: the {len(meshes)} meshes of {devices} devices, ranked", columns, [row])
    run.out.want(f"ranking {len(meshes)} meshes / capture", ratios[1], RANKING)


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
    seconds = run.rounds_of({n: partial(tapas.plan, model, inputs, mesh=mesh) for n, model in made.items()})
    rows = [
        ("module to plan", *(span(seconds[n]) for n in KINDS)),
        ("for each kind", *(f"{min(seconds[n]) / n:.2f}" for n in KINDS)),
    ]
    title = f"Transformer layers, {COPIES} copies of each kind, on {mesh}, by kinds"
    run.show("kinds", title, ("kinds", *map(str, KINDS)), rows)


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=list(LAYERS), help="those of the depth table")
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="processor time, for a machine that others use as well")
    given = parser.parse_args()
    run = Run(Results(given.json), given.rounds, time.process_time if given.cpu else time.perf_counter)
    first = of_depth("llama3-8b", 2)  # imports and first calls are nobody's time
    planning(first, "8")()
    exporting(first)()
    for table in given.tables:
        TABLES[table](given, run)
    if not run.out.met:
        run.out.console.print("planning took longer than wanted (see above)")
    return 0 if run.out.met else 1


TABLES: dict[str, Callable[[argparse.Namespace, Run], None]] = {
    "depth": lambda given, run: depth_table(given.models, sorted(given.depths), "8", run),
    "export": lambda _, run: export_table("llama3-8b", "8x8", run),
    "width": lambda _, run: width_table("llama3-8b", FEW, "8", run),
    "mesh": lambda _, run: mesh_table("llama3-8b", run),
    "meshes": lambda _, run: ranking_table("llama3-70b", 64, run),
    "kinds": lambda _, run: kinds_table("8", run),
}


if __name__ == "__main__":
    sys.exit(main())
