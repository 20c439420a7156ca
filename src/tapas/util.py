"""The few helpers that all rooms share."""

import gc
from collections.abc import Callable, Sequence
from functools import wraps
from operator import itemgetter
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Picking = Callable[[Any], tuple]
Progress = Callable[[str], None]  # is told which stage begins


def silent(stage: str) -> None:
    """A `Progress` that nobody watches."""


def paused(work: Callable[P, R]) -> Callable[P, R]:
    """The function with Python's garbage collector paused: it walks over all objects again and again while many
    are made."""

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


def picking(keys: Sequence[Any]) -> Picking:
    """A function that gets the items with these keys, as a tuple however many there are: deep models ask for the
    same ones layer after layer."""
    if len(keys) > 1:
        return itemgetter(*keys)
    if not keys:
        return lambda _: ()
    (key,) = keys
    return lambda held: (held[key],)
