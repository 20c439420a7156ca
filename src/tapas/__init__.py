"""TAPAS: the best tensor-parallel plan for a PyTorch model, with proof."""

from typing import TYPE_CHECKING, Any

# Three of the public functions have the name of a package. Python binds a package's name when it is first imported:
# that happens here, and then the name is free for the function.
import tapas.export
import tapas.plan
import tapas.verify
from tapas.errors import TapasError
from tapas.util import VERSION as __version__


def _plan_text(plan: Any) -> str:
    from tapas.report import plan_text

    return plan_text(plan)


def _plan_html(plan: Any) -> str:
    from tapas.report.html import notebook_html

    return notebook_html(plan)


tapas.plan.renderer = _plan_text
tapas.plan.html_renderer = _plan_html
for _package in ("export", "plan", "verify"):
    del globals()[_package]

if TYPE_CHECKING:
    from tapas.api import export, parallelize, plan, plan_serving, serve, verify
    from tapas.checkpoint import load_checkpoint, load_safetensors, load_weights, save_checkpoint, save_safetensors
    from tapas.hardware.cluster import Cluster
    from tapas.hardware.mesh import Mesh
    from tapas.plan.plan import Plan, load_plan
    from tapas.rules.stated import rule
    from tapas.runtime.local_optimizer import local_optimizer
    from tapas.serving.plans import ServingPlan, load_serving_plan

__all__ = [
    "Cluster",
    "Mesh",
    "Plan",
    "ServingPlan",
    "TapasError",
    "__version__",
    "export",
    "load_checkpoint",
    "load_plan",
    "load_safetensors",
    "load_serving_plan",
    "load_weights",
    "local_optimizer",
    "parallelize",
    "plan",
    "plan_serving",
    "rule",
    "save_checkpoint",
    "save_safetensors",
    "serve",
    "verify",
]

_HOMES = {
    "plan": "api",
    "parallelize": "api",
    "verify": "api",
    "export": "api",
    "plan_serving": "api",
    "serve": "api",
    "Plan": "plan.plan",
    "load_plan": "plan.plan",
    "ServingPlan": "serving.plans",
    "load_serving_plan": "serving.plans",
    "Mesh": "hardware.mesh",
    "Cluster": "hardware.cluster",
    "save_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
    "save_safetensors": "checkpoint",
    "load_safetensors": "checkpoint",
    "load_weights": "checkpoint",
    "local_optimizer": "runtime.local_optimizer",
    "rule": "rules.stated",
}


def __getattr__(name: str):
    """Import on first use: `tapas --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tapas' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"tapas.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
