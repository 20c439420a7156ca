"""`tapas plan --serve`: prefill and decode of a model that generates."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tapas.cli.app import emit, progress
from tapas.errors import TapasError

if TYPE_CHECKING:
    from tapas.models.source import ModelSource
    from tapas.planner.request import Request
    from tapas.serving.workload import Workload


def workload_of(
    serve: bool, batch: int | None, prompt: int | None, new: int | None, others: Mapping[str, object]
) -> "Workload":
    """What is served at a time; `others`: options that are not for this, and what was given for them."""
    from tapas.serving.workload import Workload

    if not serve:
        raise TapasError("--prompt, --new", "say what is served at a time", "give --serve as well, or leave them out")
    if unfit := [name for name, value in others.items() if value]:
        raise TapasError(", ".join(unfit), "does not go with --serve", "leave it out")
    if batch is None or prompt is None or new is None:
        given = {"--batch": batch, "--prompt": prompt, "--new": new}
        missing = ", ".join(name for name, value in given.items() if value is None)
        raise TapasError(missing, "is missing: it says what is served at a time", "give --batch, --prompt and --new")
    return Workload(batch, prompt, new)


def plan_and_print(
    source: "ModelSource", request: "Request", workload: "Workload", output: Path | None, as_json: bool
) -> None:
    from tapas.report.serving import serving_page
    from tapas.serving.planning import plan_serving

    with progress(5 + request.mesh.devices.bit_length()) as step:
        step("load")
        loaded = source.load(training=False)
        found = plan_serving(loaded.model, workload, request, loaded.name, step)
    if output is not None:
        found.save(output)
    emit(lambda: serving_page(found), found.to_dict, as_json)
