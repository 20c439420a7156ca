"""A rank that dies or hangs makes the others fail in a collective: in which one, of which module, and who is missing.

While all goes well, collectives are counted and the copy of a block that is being computed is noted, no more. When
one fails, the ranks that notice write where they are to the store that the process groups were made with, and wait a
moment for each other: whoever of their partners is silent is the one to look for.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import takewhile
from typing import Any

import torch.distributed as dist

from tapas._torch import default_store
from tapas.errors import TapasError

PATIENCE = 5.0  # seconds to wait for others to fail, too: those who wait for a rank that hangs run out of time together
POLL = 0.05
LENGTH = 160  # of what the backend says


class WireFailed(TapasError):
    """A collective of some ranks failed; whoever started it knows what it was for."""

    def __init__(self, kind: str, group: Any, error: Exception) -> None:
        self.ranks, self.error = dist.get_process_group_ranks(group), error
        super().__init__("ranks", f"{kind} among {_ranks(self.ranks)} failed: {_said(error)}", "one died or hangs")


class CollectiveFailed(TapasError):
    """The same, with the module that it belongs to, and who did not take part."""


class Journal:
    """Which copy of a block is being computed."""

    def __init__(self) -> None:
        self.path = ""
        # Programs call this between blocks. It has no code in Python, which torch.compile would look at each time; fx
        # writes functions by their names.
        enter: Any = partial(setattr, self, "path")
        enter.__name__, enter.__module__ = "enter", __name__
        self.enter: Callable[[str], None] = enter


@dataclass(frozen=True)
class Site:
    """Where in the model a collective belongs, by the names of the first copy of a block."""

    module: str = ""  # that reads what comes of it
    copy: str = ""
    source: str = ""  # the one that made what is sent, if it is in the same copy

    def within(self, path: str | None) -> str:
        """In the copy at a path; None: nobody knows in which."""
        ways = [self._at(module, path) for module in dict.fromkeys((self.source or self.module, self.module))]
        return " -> ".join(ways) + (" or a copy of it" if path is None and self.copy else "")

    def _at(self, module: str, path: str | None) -> str:
        inside = path is not None and self.copy and f"{module}.".startswith(f"{self.copy}.")
        return (f"{path}{module[len(self.copy) :]}" if inside else module) or "model"


def site_of_parameters(paths: Sequence[str]) -> str:
    """The module that has them all, and some of their names."""
    parts = [path.split(".") for path in paths]
    if len(parts) == 1:
        return paths[0]
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    module = ".".join(names[0] for names in shared) or "model"
    return f"{module} ({len(parts)} parameters, {paths[0]} to {paths[-1]})"


@dataclass(frozen=True)
class Sent:
    """A collective as one rank sees it."""

    place: str  # in the model
    kind: str
    axes: tuple[int, ...]
    nbytes: int
    phase: str
    number: int  # so many were started before

    def __str__(self) -> str:
        over = "axis" if len(self.axes) == 1 else "axes"
        name, axes = self.kind.replace("_", "-"), ", ".join(map(str, self.axes))
        return f"{name} over {over} {axes} in the {self.phase} pass ({self.nbytes:,} bytes, collective {self.number})"


def collective_failed(sent: Sent, ranks: Iterable[int], error: Exception) -> CollectiveFailed:
    """`ranks`: those that take part in it."""
    me, partners = dist.get_rank(), sorted(ranks)
    try:
        reports = _exchange(me, sent, partners)
    except Exception as gone:  # whatever a store raises
        fact = f"who is missing cannot be told, the store of the process groups does not answer ({_said(gone)})"
        return _error(sent, fact, error, "its host (rank 0, unless torchrun started all) may be the one that ended")
    silent = sorted({rank for report in reports.values() for rank in report["with"]} - reports.keys())
    first = min(reports, key=lambda rank: (reports[rank]["number"], rank))
    if len(silent) == 1:
        who = f"rank {silent[0]} did not arrive"
        return _error(sent, who, error, f"it ended, or hangs elsewhere: see what rank {silent[0]} said last")
    if silent:
        who = f"one of {_ranks(silent)} did not arrive, and the others of them wait for it"
        return _error(sent, who, error, "see what they said last")
    if reports[first]["number"] < sent.number:
        report = reports[first]
        who = f"rank {first} was still at {report['place']}: {report['what']}"
        return _error(sent, who, error, "see why it was slower, or took another way through the model")
    return _error(sent, "all of its ranks are alive", error, "raise the timeout of the process group if they were slow")


def _exchange(me: int, sent: Sent, partners: list[int]) -> dict[int, Any]:
    """The reports of this rank, its partners, theirs, and so on: as many as come within our patience."""
    store = default_store()
    reports: dict[int, Any] = {me: {"number": sent.number, "place": sent.place, "what": str(sent), "with": partners}}
    before = store.timeout
    store.set_timeout(timedelta(seconds=PATIENCE))
    try:
        store.set(_key(me), json.dumps(reports[me]))
        end = time.monotonic() + PATIENCE
        while silent := {rank for report in reports.values() for rank in report["with"]} - reports.keys():
            heard = [rank for rank in silent if store.check([_key(rank)])]
            reports |= {rank: json.loads(store.get(_key(rank))) for rank in heard}
            if time.monotonic() > end:
                break
            time.sleep(0 if heard else POLL)
    finally:
        store.set_timeout(before)
    return reports


def _key(rank: int) -> str:
    return f"tapas/lost/{rank}"


def _error(sent: Sent, fact: str, error: Exception, remedy: str) -> CollectiveFailed:
    return CollectiveFailed(sent.place, f"{sent} failed: {fact} ({_said(error)})", remedy)


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


def _said(error: Exception) -> str:
    """Its first sentence, without the place in the backend's own code."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error)) or type(error).__name__
    return re.split(r"\.\s|\n", text)[0][:LENGTH]
