"""Sharded implementations with their own small collectives.

A rank runs `kernel(local, comms, *operands)` instead of the operator where the factor chosen on any axis
has a `Kernel`; which function that is, `module.function` of this package, is a field of the rule.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def kernel_function(name: str) -> Callable[..., Any]:
    """`loss.cross_entropy` -> the function of that module."""
    module, _, function = name.partition(".")
    return getattr(import_module(f"tapas.runtime.kernels.{module}"), function)
