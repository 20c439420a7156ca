"""All formats by name."""

from collections.abc import Callable

from tapas.errors import TapasError, nearest
from tapas.export.dtensor_placements import export_dtensor
from tapas.export.exported import Exported
from tapas.export.jax_specs import export_jax
from tapas.export.saying import PlannedModel
from tapas.export.torch_code import export_torch
from tapas.export.transformers_plan import export_transformers
from tapas.plan.plan import Plan

OF_MODULES: dict[str, Callable[[PlannedModel, bool], Exported]] = {
    "transformers": export_transformers,
    "torch": export_torch,
}
FORMATS = (*OF_MODULES, "dtensor", "jax")


def check_format(to: str) -> None:
    if to not in FORMATS:
        raise TapasError(f"--to {to}", "there is no such format", nearest(to, list(FORMATS)))


def export_plan(plan: Plan, to: str, approximate: bool, subject: Callable[[], PlannedModel]) -> Exported:
    """A plan in another tool's format; with `approximate`, as near to it as the format allows. `subject` is asked for
    the plan's model where the format speaks of modules."""
    check_format(to)
    if to == "dtensor":
        return export_dtensor(plan)
    return export_jax(plan, approximate) if to == "jax" else OF_MODULES[to](subject(), approximate)
