"""Where a model's own operators are registered (torch.library): every rank that is a process has to import that too."""

import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from torch import nn

from tapas.errors import TapasError
from tapas.ir.custom_functions import TARGET
from tapas.ir.graph import Graph
from tapas.ir.interpreter import resolve
from tapas.ir.regions import REGION, region_named, with_regions
from tapas.models.userfile import import_file

KNOWN = {"aten", "prims", "prim", "tapas", "profiler"}  # registered by torch or by us
IMPORTING = "TAPAS_IMPORTING"  # set in ranks: what they import must not start others


@dataclass(frozen=True)
class Home:
    """A module of the user's."""

    name: str
    file: str

    def enter(self) -> None:
        if self.name != "__main__" and self.name in sys.modules:
            return
        if self.name != "__main__" and _importable(self.name):
            import_module(self.name)
        elif self.file:
            import_file(Path(self.file))


@dataclass(frozen=True)
class CarriedRegions:
    """Code of the model's own that stays whole, as a process of its own can read it."""

    pickled: bytes

    def enter(self) -> None:
        with_regions(pickle.loads(self.pickled))  # written by our own parent


def _importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def homes_of(model: nn.Module, graph: Graph) -> tuple[Home | CarriedRegions, ...]:
    """The modules that the model's classes are from, if it calls operators or functions that torch does not have; and
    the code that stays whole."""
    ops = (*graph.ops, *graph.prelude)
    targets = {op.target for op in ops}
    if targets.isdisjoint((TARGET, REGION)) and all(target.split(".")[0] in KNOWN for target in targets):
        return ()
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    own = [name for name in names if name.split(".")[0] not in ("torch", "tapas")]
    homes = [Home(name, getattr(sys.modules.get(name), "__file__", None) or "") for name in own]
    return (*homes, *_carried([op.args[1] for op in ops if op.target == REGION]))


def _carried(names: Sequence[str]) -> Iterator[CarriedRegions]:
    try:
        yield CarriedRegions(pickle.dumps({name: region_named(name) for name in names}))
    except Exception:  # whatever modules do not like about it: then only this process can run it, and others say so
        return


def enter_homes(homes: tuple[Home | CarriedRegions, ...], graph: Graph) -> None:
    """Import what defines operators, and refuse one that is still not there."""
    for home in homes:
        home.enter()
    for op in (*graph.ops, *graph.prelude):
        try:
            resolve(op.target)
        except AttributeError:
            raise TapasError(
                op.module or op.name, f"{op.target} is not registered in the processes that are the ranks",
                "register it in the file that defines the model, or verify in one process (--in-process)",
            ) from None  # fmt: skip


def refuse_within_import() -> None:
    if os.environ.get(IMPORTING):
        raise TapasError(
            "verify", "it is called again when a rank imports the file that calls it",
            "put what the file does under if __name__ == '__main__'",
        )  # fmt: skip
