"""The few helpers that all rooms share."""

import gc
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from operator import itemgetter
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tapas.errors import PlanError

VERSION = "0.1.0"
P = ParamSpec("P")
R = TypeVar("R")

Picking = Callable[[Any], tuple[Any, ...]]
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


def told_once(texts: Iterable[str]) -> list[str]:
    """Texts that differ in the numbers of layers only become one.

    >>> told_once(["layers.0.mlp: whole", "head: whole", "layers.1.mlp: whole"])
    ['layers.*.mlp: whole (2 places)', 'head: whole']
    """
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=[.: ])", "*", text), []).append(text)
    return [same[0] if len(same) == 1 else f"{pattern} ({len(same)} places)" for pattern, same in groups.items()]


def write_file(path: str | Path, content: bytes) -> None:
    """The file is complete or not there at all, and an old one stays, with its mode, until then."""
    target = Path(path)
    check_target(target)
    # a name that nobody can foresee, in a file that is new: another's link in a shared folder is never followed
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            if target.is_file():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise PlanError(str(target), f"cannot be written: {error.strerror}", "write elsewhere") from None
    finally:
        temporary.unlink(missing_ok=True)


def check_target(path: str | Path) -> None:
    """Refuse a place where no file can be written, before any work is done for it."""
    target = Path(path)
    if not target.parent.is_dir():
        raise PlanError(str(target), "the folder does not exist", "make it first, or write elsewhere")
    if target.is_dir():
        raise PlanError(str(target), "is a folder", "give the name of a file in it")
    if not os.access(target.parent, os.W_OK):
        raise PlanError(str(target), "its folder cannot be written to", "write elsewhere")


class UnionFind:
    """Disjoint sets of anything hashable."""

    def __init__(self) -> None:
        self._parent: dict = {}

    def find(self, item):
        root = item
        while self._parent.setdefault(root, root) != root:
            root = self._parent[root]
        while self._parent[item] != root:
            self._parent[item], item = root, self._parent[item]
        return root

    def join(self, first, second) -> None:
        self._parent[self.find(second)] = self.find(first)
