"""`tapas export`: a plan in the format of another tool."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from tapas.cli import options as given
from tapas.cli.app import guarded, progress

_TO = "transformers, torch, dtensor or jax: see above."
To = Annotated[str, Option("--to", metavar="FORMAT", help=_TO, show_default=False)]
_APPROXIMATE = "Export what the format can say, and tell what was left out and what that costs."
Approximate = Annotated[bool, Option("--approximate", help=_APPROXIMATE)]
_FILE = "Write it to this file instead of the terminal."
File = Annotated[Path | None, Option("--output", "-o", metavar="FILE", help=_FILE, show_default=False)]


@guarded
def export(
    *, file: given.PlanFile, to: To, approximate: Approximate = False, output: File = None, as_json: given.Json = False
) -> None:
    """Write a plan in the format of another tool.

    transformers: a DistributedConfig with its tp_plan for from_pretrained, as JSON.

    torch: a Python file with parallelize_module and fully_shard.

    dtensor: for each parameter the placements that torch's distribute_tensor takes, as JSON.

    jax: for each parameter a PartitionSpec, with the mesh, as a Python file.

    What a format cannot say is refused, with all reasons. With --approximate the best plan that it can say is
    searched for and exported instead, with what was left out and what that costs by the same cost model."""
    from tapas.export.formats import check_format, export_plan
    from tapas.export.saying import PlannedModel
    from tapas.models.source import source_of
    from tapas.plan.plan import load_plan
    from tapas.util import check_target, write_file

    check_format(to)
    if output is not None:
        check_target(output)
    with progress(4) as step:
        step("load")
        plan = load_plan(file)

        def subject() -> PlannedModel:
            source, request = source_of(plan, str(file))
            return PlannedModel(plan, *source.with_graph(request.training, step))

        step("export")
        found = export_plan(plan, to, approximate, subject)
    if output is not None:
        write_file(output, found.text.encode())
    tell(found, output, as_json)


def tell(found: Any, output: Path | None, as_json: bool) -> None:
    """The file itself, or where it is; what was left out and what the tool does in its own way also beside it."""
    import json

    if as_json:
        typer.echo(json.dumps(found.to_dict() | {"file": str(output or "")}, indent=1))
        return
    lines = [f"left out: {text}" for text in found.dropped]
    if found.seconds is not None:
        lines.append(priced(found.planned_seconds, found.seconds))
    if output is None:
        typer.echo(found.text, nl=False)
        for line in lines:
            typer.echo(line, err=True)
        return
    typer.echo("\n".join([f"wrote {output}", *lines, *(f"note: {text}" for text in found.notes)]))


def priced(planned: float, exported: float) -> str:
    slower = f"{exported / planned - 1:+.1%}" if planned else ""
    return f"by the cost model a step takes {exported:.4g} s like this, {planned:.4g} s as planned ({slower})"
