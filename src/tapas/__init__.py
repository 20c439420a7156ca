"""TAPAS: the best tensor-parallel plan for a PyTorch model, with proof."""

from typing import TYPE_CHECKING

from tapas.errors import TapasError

if TYPE_CHECKING:
    from tapas.checkpoints import load_checkpoint, load_safetensors, load_weights, save_checkpoint, save_safetensors
    from tapas.cluster import Cluster, Mesh
    from tapas.pipeline import plan
    from tapas.plans import Plan, load_plan
    from tapas.running import parallelize
    from tapas.verification import verify

__version__ = "0.1.0"
__all__ = [
    "Cluster",
    "Mesh",
    "Plan",
    "TapasError",
    "__version__",
    "load_checkpoint",
    "load_plan",
    "load_safetensors",
    "load_weights",
    "parallelize",
    "plan",
    "save_checkpoint",
    "save_safetensors",
    "verify",
]

_HOMES = {
    "plan": "pipeline",
    "parallelize": "running",
    "verify": "verification",
    "Plan": "plans",
    "load_plan": "plans",
    "Mesh": "cluster",
    "Cluster": "cluster",
    "save_checkpoint": "checkpoints",
    "load_checkpoint": "checkpoints",
    "save_safetensors": "checkpoints",
    "load_safetensors": "checkpoints",
    "load_weights": "checkpoints",
}


def __getattr__(name: str):
    """Import on first use: `tapas --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tapas' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"tapas.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
