"""All formats by name."""

from tapas.errors import TapasError, nearest
from tapas.export.dtensor_placements import export_dtensor
from tapas.export.exported import Exported
from tapas.export.jax_specs import export_jax
from tapas.plan.plan import Plan

FORMATS = ("dtensor", "jax")


def check_format(to: str) -> None:
    if to not in FORMATS:
        raise TapasError(f"--to {to}", "there is no such format", nearest(to, list(FORMATS)))


def export_plan(plan: Plan, to: str, approximate: bool = False) -> Exported:
    """A plan in another tool's format; with `approximate`, as near to it as the format allows."""
    check_format(to)
    match to:
        case "dtensor":
            return export_dtensor(plan)
        case _:
            return export_jax(plan, approximate)
