"""The command line: thin. Heavy imports happen inside the commands, so that --help answers at once."""

import json
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from tapas.cli import options as given
from tapas.cli.app import app, emit, fail, guarded, progress, stoppable
from tapas.cli.calibrate import calibrate
from tapas.cli.export import export
from tapas.cli.report import name_report, report, write_report
from tapas.cli.serving import plan_and_print, workload_of
from tapas.cli.validate import validate
from tapas.errors import TapasError
from tapas.util import VERSION


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False) -> None:
    if version:
        typer.echo(f"tapas {VERSION}")
        raise typer.Exit


@app.command()
@guarded
def plan(
    *, model: given.Model, mesh: given.AnyMesh = "", devices: given.Devices = None, nodes: given.Nodes = None,
    per_node: given.PerNode = None, sweep: given.Sweep = "", plot: given.Plot = None, sources: given.SourceOptions,
    requests: given.RequestOptions, foreign: given.From = "", memory: given.Memory = given.DEVICE,
    time_limit: given.TimeLimit = None, no_baselines: given.NoBaselines = False,
    check_fold: given.CheckFold = False, output: given.Output = None, report: given.ReportFile = None,
    trace: given.TimelineFile = None, serve: given.Serve = False, prompt: given.Prompt = None,
    new: given.New = None, as_json: given.Json = False,
) -> None:  # fmt: skip
    """Find the fastest plan for MODEL on a mesh of devices, and print it.

    With --devices (or --nodes) instead of --mesh, all meshes of so many devices are tried: the order of axes says
    how they lie over the nodes. With --sweep that is done for several numbers of devices.

    Ctrl-C while it searches, or --time-limit, ends the search with the best plan so far.

    With --from, what another tool does at present is priced and explained: a tp_plan or DistributedConfig of
    transformers, DTensor placements (as `tapas export` writes them), or Megatron's degrees as
    {"tensor_model_parallel_size": 8, "sequence_parallel": true}. `tapas compare` shows how it differs from the best.

    With --serve, --batch prompts of --prompt tokens are continued by --new tokens each: prefill and decode are two
    programs over one set of weights and one cache. `tapas.serve` runs the plan."""
    from tapas.hardware.cluster_files import load_cluster
    from tapas.hardware.mesh import counted, parse_mesh
    from tapas.plan.perfetto import check_trace
    from tapas.util import check_target

    if serve or prompt is not None or new is not None:
        others = {
            "--devices": devices is not None, "--nodes": nodes is not None, "--sweep": bool(sweep), "--trace": trace,
            "--plot": plot, "--from": bool(foreign), "--report": report, "--time-limit": time_limit is not None,
            "--seq": sources.seq is not None, "--pieces": requests.pieces > 1, "--accumulate": requests.accumulate > 1,
            "--check-fold": check_fold, "--compile": requests.compile, "--capacity": requests.capacity is not None,
        }  # fmt: skip
        workload = workload_of(serve, sources.batch, prompt, new, others)
        asked = requests.request(mesh, False, memory, baselines=not no_baselines)
        return plan_and_print(sources.source(model), asked, workload, output, as_json)
    if trace is not None:
        check_trace(trace)
    machine, many = counted(
        load_cluster(requests.cluster), devices, nodes, per_node, parse_mesh(mesh) if mesh else None
    )
    counts = sweep_of(sweep, plot, any((mesh, many, output, report, trace)))
    many = counts[0] if counts else many
    anywhere = not mesh and many is not None
    if foreign:
        check_foreign(foreign, anywhere or bool(counts))
    source = sources.source(model)
    request = requests.request(
        str(many) if anywhere else mesh,
        sources.training,
        memory,
        machine,
        baselines=not no_baselines,
        time_limit=time_limit,
    )
    for target in filter(None, (output, report)):
        check_target(target)
    if counts:
        return print_sweep(source, request, counts, plot, as_json)
    meshes, found = searched(source, request, many if anywhere else None, foreign, check_fold, report)
    if output is not None:
        found.save(output)
    if trace is not None:
        from tapas.plan.perfetto import write_simulated

        write_simulated(trace, found)

    from tapas.report.meshes import with_meshes
    from tapas.report.plan import plan_page

    emit(
        lambda: with_meshes(meshes, found, plan_page(found)),
        lambda: found.to_dict() | ({"meshes": [row.to_dict() for row in meshes]} if meshes else {}),
        as_json,
    )
    name_report(report, as_json)


def searched(
    source: Any, request: Any, many: int | None, foreign: str, check_fold: bool, report: Path | None
) -> tuple[list[Any], Any]:
    """The plan; and, if `many` devices may be any mesh, all of these meshes. A report is written while the model is at
    hand."""
    from tapas.planner.pipeline import plan_devices, plan_graph

    meshes: list[Any] = []
    with progress(5 + len(request.baselines) + 20 * (many is not None)) as step, stoppable():
        graph, hints = source.capture(request.training, step, check_fold)
        if foreign:
            from tapas.export.foreign import with_foreign

            names = [path for leaf in graph.parameters() for path in leaf.paths]
            request = with_foreign(request, foreign, hints, names)
        if many is not None:
            meshes, found = plan_devices(graph, request, many, hints, step)
        else:
            found = plan_graph(graph, request, hints, progress=step)
        found = source.recorded_in(found)
        if report is not None:
            write_report(report, found, graph, hints, step, meshes=meshes)
    return meshes, found


def check_foreign(given: str, many_meshes: bool) -> None:
    from tapas.export.foreign import check_file

    if many_meshes:
        raise TapasError(f"--from {given}", "a plan of another tool is for one mesh", "give that with --mesh")
    check_file(given)


def sweep_of(text: str, plot: Path | None, other: bool) -> list[int]:
    """The numbers of devices of a sweep, if there is to be one."""
    if not text:
        if plot is not None:
            raise TapasError(f"--plot {plot}", "there is no sweep to draw", "give --sweep devices=8,16,64 as well")
        return []
    from tapas.planner.device_sweep import parse_sweep

    counts = parse_sweep(text)
    if other:
        remedy = "leave out --mesh, --devices, --nodes, --output, --report and --trace"
        raise TapasError(f"--sweep {text}", "a sweep tries all meshes of several numbers of devices", remedy)
    if plot is not None:
        from tapas.report.pictures import check_plot

        check_plot(plot)
    return counts


def print_sweep(source: Any, request: Any, counts: list[int], plot: Path | None, as_json: bool) -> None:
    from tapas.planner.device_sweep import sweep

    with progress(3 + 20 * len(counts)) as step:
        graph, hints = source.capture(request.training, step)
        rows = sweep(graph, request, counts, hints, step)
    if plot is not None and any(row.speedup for row in rows):
        from tapas.report.meshes import draw_scaling

        draw_scaling(rows, plot, f"{source.model} on {request.cluster.name}")
    from tapas.report.meshes import scaling_page

    emit(lambda: scaling_page(rows, str(plot or "")), lambda: {"sweep": [row.to_dict() for row in rows]}, as_json)


@app.command()
@guarded
def frontier(
    *, model: given.Model, mesh: given.MeshText = "", sources: given.SourceOptions, requests: given.RequestOptions,
    check_fold: given.CheckFold = False, points: given.Points = 8, output: given.Folder = None,
    plot: given.Plot = None, as_json: given.Json = False,
) -> None:  # fmt: skip
    """Show how step time trades against memory per device: plans from the most frugal to the fastest.

    Each search is a short one: the column `gap` says how much faster a plan of the same memory might be at most;
    `tapas plan --memory` searches longer."""
    from tapas.planner.frontier import check_folder, plan_frontier

    source, request = sources.source(model), requests.request(mesh, sources.training)
    if output is not None:
        check_folder(output)
    if plot is not None:
        from tapas.report.pictures import check_plot

        check_plot(plot)
    with progress(6 + points) as step:
        graph, hints = source.capture(request.training, step, check_fold)
        found = plan_frontier(graph, request, points, hints, step).keeping(source.recorded_in)
    if output is not None:
        found.save(output)
    if plot is not None:
        from tapas.report.frontier import draw_frontier

        draw_frontier(found, plot)

    from tapas.report.frontier import frontier_page

    emit(lambda: frontier_page(found, output), found.to_dict, as_json)


@app.command()
@guarded
def fold(
    *, model: given.Model, sources: given.SourceOptions, check_fold: given.CheckFold = False,
    as_json: given.Json = False,
) -> None:  # fmt: skip
    """Show the unique substructures of MODEL and how often each is repeated."""
    with progress(3) as step:
        graph, _ = sources.source(model).capture(sources.training, step, check_fold)
        step("fold")
        from tapas.ir.fold import fold as folding

        folded = folding(graph)
    from tapas.report.fold import fold_dict, fold_page

    emit(
        lambda: fold_page(folded, graph, check_fold),
        lambda: fold_dict(folded, graph) | ({"checked": True} if check_fold else {}),
        as_json,
    )


@app.command()
@guarded
def explain(
    *, model: given.ModelOrPlan, pattern: given.Pattern, mesh: given.MeshText = "", sources: given.SourceOptions,
    requests: given.RequestOptions, memory: given.Memory = given.DEVICE, limit: given.Limit = 8,
    as_json: given.Json = False,
) -> None:  # fmt: skip
    """Show what was chosen for PATTERN, what the alternatives would cost, and why they lose."""
    from tapas.planner.explain import explain as explaining

    source, request, _ = given.model_or_plan(model, mesh, sources, requests, memory)
    with progress(5 + 2 * limit) as step:
        graph, hints = source.capture(request.training, step)
        found = explaining(graph, request, pattern, limit, hints, step)
    from tapas.report.explain import explain_page

    emit(lambda: explain_page(found), found.to_dict, as_json)


@app.command()
@guarded
def verify(
    *, model: given.ModelOrPlan, mesh: given.MeshText = "", sources: given.SourceOptions,
    requests: given.RequestOptions, memory: given.Memory = given.DEVICE, in_process: given.InProcess = False,
    steps: given.Steps = 3, timeout: given.Timeout = 120.0, trace: given.TraceFile = None,
    trace_device: given.TraceDevice = "cpu", as_json: given.Json = False,
) -> None:  # fmt: skip
    """Run MODEL in parallel on this machine and compare it with the original: exit code 0 only if all agrees.

    Both run in float64 and in float32 on random weights and data, whatever the plan's dtype is. The plan is the
    best one for the cluster; tiny models are often fastest unsplit there: pin what you want to see. With --trace, a
    step of what is verified is recorded in the model's own dtype."""
    source, request, planned = given.model_or_plan(model, mesh, sources, requests, memory)
    from tapas.verify.trace import TraceRequest
    from tapas.verify.verification import RankFailed, verify_source

    recorded = TraceRequest.of(trace, trace_device, in_process)
    with progress(7 + (recorded is not None)) as step:
        try:
            found = verify_source(
                source, request, planned, in_process=in_process, steps=steps, timeout=timeout, trace=recorded,
                progress=step,
            )  # fmt: skip
        except RankFailed as error:
            return fail(error, as_json, code=1)
    from tapas.report.verify import verify_page

    emit(lambda: verify_page(found, traced=recorded is not None), found.to_dict, as_json)
    if not found.ok:
        raise typer.Exit(1)


@app.command()
@guarded
def compare(first: given.PlanFile, second: given.PlanFile, as_json: given.Json = False) -> None:
    """Show what two plans cost and where they differ."""
    from tapas.plan.compare import compare as comparing
    from tapas.plan.plan import load_plan
    from tapas.report.compare import compare_page

    found = comparing(load_plan(first), load_plan(second))
    emit(lambda: compare_page(found, (str(first), str(second))), found.to_dict, as_json)


@app.command()
@guarded
def show(file: given.PlanFile, as_json: given.Json = False) -> None:
    """Print a plan that was saved."""
    from tapas.plan.plan import load_plan
    from tapas.report.plan import plan_page

    found = load_plan(file)
    emit(lambda: plan_page(found), found.to_dict, as_json)


app.command()(export)
app.command()(calibrate)
app.command()(validate)


@app.command()
@guarded
def models(as_json: given.Json = False) -> None:
    """List the models known by name."""
    from tapas.models.catalog import PRESETS
    from tapas.report.presets import model_dict, models_page

    emit(lambda: models_page(PRESETS.values()), lambda: [model_dict(p) for p in PRESETS.values()], as_json)


@app.command()
@guarded
def clusters(as_json: given.Json = False) -> None:
    """List the clusters known by name, with their figures and where these come from.

    A cluster of your own is a file, given with --cluster mine.toml. Links are per device and one direction; the
    figures of dtypes that are left out are those of float32:

        per_node = 4
        device.name = "my GPU"
        device.memory_bytes = 48e9
        device.memory_bytes_per_s = 864e9
        device.launch_seconds = 4e-6
        device.efficiency = 0.6
        device.flops_per_s = { float32 = 91e12, bfloat16 = 181e12 }
        intra = { bytes_per_s = 25e9, latency_seconds = 5e-6 }
        inter = { bytes_per_s = 10e9, latency_seconds = 1e-5 }
    """
    from tapas.hardware.cluster_files import cluster_to_dict
    from tapas.hardware.cluster_files import clusters as known
    from tapas.report.presets import clusters_page

    found = known().values()
    emit(lambda: clusters_page(found), lambda: [cluster_to_dict(c) for c in found], as_json)


@app.command()
@guarded
def zoo(
    *, types: given.ModelTypes = None, output: given.ZooFile = Path("zoo.jsonl"), page: given.ZooPage = None,
    jobs: given.Jobs = 1, timeout: given.Timeout = 120.0, as_json: given.Json = False,
) -> None:  # fmt: skip
    """Plan and verify small models of transformers' types, each in a process of its own.

    What is in the results already is left out: stopped, it goes on where it was."""
    from dataclasses import asdict

    from tapas.util import check_target, write_file
    from tapas.verify.zoo import all_types, run_zoo
    from tapas.verify.zoo_page import shares, zoo_text

    for path in (output, page):
        if path is not None:
            check_target(path)
    wanted = types or all_types()
    with progress(len(wanted)) as step:
        rows = run_zoo(wanted, output, jobs, timeout, lambda row: step(f"{row.type}: {row.outcome}"))
    if page is not None:
        write_file(page, zoo_text(rows.values(), all_types()).encode())
    if as_json:
        return typer.echo(json.dumps({**shares(rows.values()), "types": [asdict(row) for row in rows.values()]}))
    typer.echo(zoo_text(rows.values()))


app.command()(guarded(report))


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that lacks × or ─ shows ? instead of a traceback
            stream.reconfigure(errors="replace")
    app()
