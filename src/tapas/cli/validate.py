"""`tapas validate`: a plan held against one device."""

from typing import Annotated

from typer import Option

from tapas.cli import options as given
from tapas.cli.app import emit, guarded, progress

OnDevice = Annotated[str, Option("--device", help="cpu or cuda.")]
Rounds = Annotated[int, Option(min=1, help="Steps that are timed.")]


@guarded
def validate(
    *, model: given.ModelOrPlan, mesh: given.MeshText = "", sources: given.SourceOptions,
    requests: given.RequestOptions, memory: given.Memory = given.DEVICE, device: OnDevice = "cpu",
    rounds: Rounds = 5, as_json: given.Json = False,
) -> None:  # fmt: skip
    """Run the first rank's program on one device, and print planned against measured time and memory.

    Values are real, collectives send nothing: a user with one GPU knows before renting many. The cluster's figures
    should be those of that device (`tapas calibrate`)."""
    from tapas.report.validate import validation_page
    from tapas.verify.validation import check_device, validate_source

    check_device(device)
    source, request, planned = given.model_or_plan(model, mesh, sources, requests, memory)
    with progress(6) as step:
        found = validate_source(source, request, planned, device, rounds, step)
    emit(lambda: validation_page(found), found.to_dict, as_json)
