"""Finds the regions of a model (ir/regions.py): what cannot be exported, by the statement where that shows.

From the innermost statement outwards, the first stretch is taken that is given tensors, modules and plain values, and
makes tensors. For that the model is run once, as it is, on the example inputs, whose values tell the shapes of what is
made. In an export the stretch is then one call of an operator.
"""

import copy
import inspect
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn

from tapas._torch import pytree
from tapas.capture.assertions import FOLLOWED, of_model, position_in
from tapas.capture.diagnostics import FAILS
from tapas.capture.eager_behaviour import as_in_eager
from tapas.capture.region_example import Given, Odd, OddSizes, observed
from tapas.capture.stretches import Stretch, compiled, stretch_at
from tapas.errors import CaptureError
from tapas.ir.regions import Region, region_named

MOST = 40  # stretches that are tried
_all: list[Stretch] = []  # by number, as calls in compiled code name them
_working = threading.local()  # the Regions that this thread is finding, or exporting


@dataclass(eq=False)
class FoundRegion:
    stretch: Stretch
    callers: Sequence[Stretch]  # where its function is called, and so on
    reason: str
    number: int
    calls: list[tuple[str, str]] = field(default_factory=list)  # in the example: the region, and in which module


class Regions:
    """Those of one model that have been found so far."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model, self.inputs = model, (args, kwargs)
        self.found: list[FoundRegion] = []
        self.anew: dict[CodeType, CodeType] = {}  # compiled code, and what was written
        self.counts: dict[int, int] = {}  # calls so far, in an export
        self.paths: dict[int, str] | None = None  # of modules, while the example runs
        self.observing = False  # one of them: those within run as written
        self.any_size = False  # whether what a region makes may have other sizes for other values
        self.sizes = False  # whether that is why a stretch was not taken

    @property
    def notes(self) -> list[str]:
        """What the plan says of them."""
        return [
            f"{region_named(name).place}: this code stays whole, every rank runs it as it is: {found.reason}"
            for found in self.found
            for name, _ in found.calls
        ]

    @property
    def modules(self) -> set[str]:
        """The paths of modules in which they are."""
        return {path for found in self.found for _, path in found.calls}

    # -- finding them ----------------------------------------------------------------------------

    def find(self, error: CaptureError) -> bool:
        """Take out what the error is about, if there is a way: the next export gets further."""
        stretches = [] if error.__cause__ is None else [*self._stretches(error.__cause__)]
        if not stretches:  # what was refused stays refused
            return False
        if not _real(self.model, self.inputs):
            remedy = f"{error.remedy}; or give weights and inputs with data: then this code may stay whole"
            raise CaptureError(error.place, error.fact, remedy)
        if not self.found and isinstance(self._run(), Exception):  # then it is not the export that fails
            return False
        innermost, *callers = stretches
        reason = error.fact.partition("): ")[2] if error.fact.startswith(FAILS) else error.fact
        for self.any_size in (False, True):
            self.sizes = False
            self.found.append(_numbered(innermost, callers, reason))
            if self._widened():
                return True
            self.found.pop()
            if not self.sizes:
                break
        return False

    def _widened(self) -> bool:
        """Whether the last one, or what is around it, can be taken out."""
        for _ in range(MOST):
            last = self.found[-1]
            if last.stretch.everything and not last.callers:  # nothing would be left to plan
                break
            odd = self._example() if last.stretch.feasible else Odd("cannot be taken out")
            if odd is None:
                self.found = [f for f in self.found if f is last or (f.calls and not last.stretch.holds(f.stretch))]
                return True
            self.sizes |= isinstance(odd, OddSizes)
            wider, callers = last.stretch.wider(set(odd.made), set(odd.given)), last.callers
            if wider is None and callers:
                wider, *callers = callers
            if wider is None:
                break
            self.found[-1] = _numbered(wider, callers, last.reason)
        return False

    def _stretches(self, error: BaseException) -> Iterator[Stretch]:
        """The statements that an error came through, innermost first."""
        frames: list[Stretch] = []
        chain: BaseException | None = error
        while chain is not None:
            calls = [*traceback.walk_tb(chain.__traceback__)]
            names = [frame.f_code.co_name for frame, _ in calls]
            start = names.index(FOLLOWED) + 1 if FOLLOWED in names else len(calls)
            places = [*_instructions(chain)][start:]
            within = [s for code, instruction in places if (s := self._stretch(code, instruction)) is not None]
            frames = within if len(within) > len(frames) else frames
            chain = chain.__cause__ or chain.__context__
        taken = [found.stretch for found in self.found]
        yield from (stretch for stretch in reversed(frames) if not any(t.holds(stretch) for t in taken))

    def _stretch(self, code: CodeType, instruction: int) -> Stretch | None:
        position = position_in(code, instruction)
        if position is None or not of_model(code.co_filename):
            return None
        return stretch_at(self.anew.get(code, code), position)

    def _example(self) -> Odd | None:
        """Run the model, and keep what every call of a stretch is given and makes."""
        for found in self.found:
            found.calls.clear()
        error = self._run()
        if error is not None:
            return error if isinstance(error, Odd) else Odd(str(error))
        return None if self.found[-1].calls else Odd("is not run")

    def _run(self) -> Exception | None:
        """A copy of the model on the example inputs, as it is but for the stretches; how that fails."""
        try:
            model, (args, kwargs) = copy.deepcopy((self.model, self.inputs))
            self.paths = {id(module): path for path, module in model.named_modules()}
            with torch.random.fork_rng(devices=[]), self.taken_out(), as_in_eager(model, kwargs), torch.enable_grad():
                model(*args, **kwargs)
        except Exception as error:  # it may raise anything, or cannot be copied
            return error
        finally:
            self.paths, self.observing = None, False
        return None

    # -- with stretches taken out ----------------------------------------------------------------

    @contextmanager
    def taken_out(self) -> Iterator[None]:
        """Within, this thread's calls of the stretches come here; those of others run as written."""
        before, functions = getattr(_working, "regions", None), []
        _working.regions, self.counts = self, {}
        try:
            outer = [f for f in self.found if not any(g is not f and g.stretch.holds(f.stretch) for g in self.found)]
            for code in dict.fromkeys(found.stretch.code for found in outer):
                own = {f.stretch: f"__import__({__name__!r}, fromlist=('met',)).met({f.number}, locals())"
                       for f in outer if f.stretch.code is code}  # fmt: skip
                made, function = compiled(own), next(iter(own)).function
                if made is None:
                    raise Odd("its function cannot be compiled anew")
                self.anew[made] = code
                functions.append((function, code))
                function.__code__ = made
            yield
        finally:
            for function, code in functions:
                function.__code__ = code
            _working.regions = before

    def restart(self, *_: Any) -> None:
        """Forward begins anew."""
        self.counts.clear()

    def made(self, number: int, scope: dict[str, Any]) -> Any:
        """What a stretch makes: of values, in the example; without data, in an export."""
        found = next(f for f in self.found if f.number == number)
        if self.paths is not None:
            module, place = self._module(found.stretch)
            self.observing = True
            made, name = observed(found.stretch, scope, place, self.any_size or found is not self.found[-1])
            self.observing = False
            found.calls.append((name, module))
            return made
        count = self.counts[number] = self.counts.get(number, 0) + 1
        if count > len(found.calls):
            raise _unlike(found.stretch, "it runs more often")
        name, _ = found.calls[count - 1]
        return _exported(region_named(name), name, scope, found.stretch)

    def _module(self, stretch: Stretch) -> tuple[str, str]:
        """The path of the module that runs, and what to call the place."""
        assert self.paths is not None
        owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(inspect.currentframe()))
        path = next((self.paths[id(owner)] for owner in owners if id(owner) in self.paths), "")
        return path, f"{path or type(self.model).__name__} ({stretch.place})"


def _numbered(stretch: Stretch, callers: Sequence[Stretch], reason: str) -> FoundRegion:
    _all.append(stretch)
    return FoundRegion(stretch, callers, reason, len(_all) - 1)


def _instructions(error: BaseException) -> Iterator[tuple[CodeType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code, trace.tb_lasti
        trace = trace.tb_next


def _real(model: nn.Module, inputs: Any) -> bool:
    held = (*model.parameters(), *model.buffers(), *pytree.tree_leaves(inputs))
    return not any(isinstance(t, torch.Tensor) and t.is_meta for t in held)


def _unlike(stretch: Stretch, fact: str) -> CaptureError:
    remedy = "let it do the same whenever it is called"
    return CaptureError(stretch.place, f"{fact} when the model is exported than when it runs", remedy)


def _exported(region: Region, name: str, scope: Mapping[str, Any], stretch: Stretch) -> Any:
    given = Given.of({key: scope[key] for key in region.statements.names if key in scope})
    if not given.like(region):
        raise _unlike(stretch, "it is given other things")
    state = given.state()
    operands = [*given.tensors, *(state[path] for path in region.state)]
    results = list(torch.ops.tapas.region(operands, name))
    for number, (result, wanted) in enumerate(zip(results, region.results, strict=True)):
        if not wanted.trained and result.is_floating_point():
            results[number] = result.detach()
    targets = [*(given.tensors[i] for i in region.written), *(state[path] for path in region.buffers)]
    for target, value in zip(targets, results[len(results) - len(targets) :], strict=True):
        target.copy_(value)
    return region.filled(results)


def met(number: int, scope: dict[str, Any], _: Any) -> Any:
    """Called where a stretch was: what it returns, or the values of the names that it binds."""
    stretch, working = _all[number], getattr(_working, "regions", None)
    if working is None or working.observing or all(found.number != number for found in working.found):
        statements = stretch.statements(list(scope))
        found = statements({name: scope[name] for name in statements.names})
    else:
        found = working.made(number, scope)
    return found if stretch.returning else tuple(found.get(name) for name in stretch.outputs)
