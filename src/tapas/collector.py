"""Python's garbage collector, paused: it walks over all objects again and again while many are made."""

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def paused(work: Callable[P, R]) -> Callable[P, R]:
    """The function with the collector paused, until all it does not return is gone again."""

    @wraps(work)
    def quietly(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return work(*args, **kwargs)
        gc.disable()
        try:
            return work(*args, **kwargs)
        finally:
            gc.enable()

    return quietly
