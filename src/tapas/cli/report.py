"""`tapas report`, and what `tapas plan --report` writes: a plan as a page for the browser."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tapas.cli import options as given
from tapas.cli.app import progress
from tapas.errors import TapasError

if TYPE_CHECKING:
    from tapas.ir.graph import Graph
    from tapas.plan.plan import Plan
    from tapas.util import Progress

SECONDS = 20.0  # for alternatives


def report(
    *, model: given.ModelOrPlan, other: given.OtherPlan = None, mesh: given.MeshText = "",
    sources: given.SourceOptions, requests: given.RequestOptions, memory: given.Memory = given.DEVICE,
    output: given.PageFile, alternatives: given.Alternatives = None, curve: given.CurvePoints = 0,
) -> None:  # fmt: skip
    """Write a plan as a page for the browser: one file that needs nothing else.

    MODEL is planned as `tapas plan` does; a PLAN that was saved is shown as it is, and two of them are compared."""
    from tapas.planner.pipeline import plan_graph
    from tapas.report.html import View, write_page
    from tapas.util import check_target

    check_target(output)
    if other is not None:
        write_page(output, two_views(Path(model), other, alternatives, curve))
        return name_report(output)
    source, request, planned = given.model_or_plan(model, mesh, sources, requests, memory)
    seconds = alternatives if alternatives is not None else 0.0 if planned else SECONDS
    with progress(7 + 5 * len(request.baselines) * (planned is None) + 12 * bool(seconds) + curve) as step:
        if planned is not None and not seconds and not curve:
            write_page(output, [View(planned, name=model)])
            return name_report(output)
        graph, hints = source.capture(request.training, step)
        found = planned or source.recorded_in(plan_graph(graph, request, hints, progress=step))
        name = model if planned else ""
        write_report(output, found, graph, hints, step, seconds=seconds, curve=curve, name=name)
    name_report(output)


def two_views(first: Path, second: Path, alternatives: float | None, curve: int) -> list[Any]:
    from tapas.plan.plan import load_plan
    from tapas.report.html import View

    if alternatives or curve:
        option = "--alternatives" if alternatives else "--curve"
        raise TapasError(option, "is for one plan", "leave it out, or write a report for each plan")
    return [View(load_plan(p), letter=letter, name=p.name) for p, letter in zip((first, second), "ab", strict=True)]


def write_report(
    path: Path,
    plan: "Plan",
    graph: "Graph",
    hints: Mapping[str, str] | None,
    step: "Progress",
    *,
    meshes: Sequence[Any] = (),
    seconds: float = SECONDS,
    curve: int = 0,
    name: str = "",
) -> None:
    """The page of a plan whose model is at hand: with alternatives, and a curve if it is wanted."""
    from tapas.models.source import source_of
    from tapas.planner.explain import what_if
    from tapas.planner.frontier import plan_frontier
    from tapas.report.html import Findings, View, write_page

    _, request = source_of(plan, str(path))
    tried = what_if(graph, request, plan, seconds, hints, step) if seconds else None
    plans = plan_frontier(graph, request, curve, hints, step) if curve else None
    step("write the report")
    write_page(path, [View(plan, Findings(meshes, plans, tried), name=name)])


def name_report(path: Path | None, as_json: bool = False) -> None:
    """The last line of what is printed; nothing but JSON is, where that was asked for."""
    if path is not None:
        typer.echo(f"{'' if as_json else chr(10)}Report written to {path}", err=as_json)
