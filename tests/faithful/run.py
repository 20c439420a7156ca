"""The original and the parallel module, trained side by side: what a user can see of them has to be the same."""

import copy
import dataclasses
import inspect
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tapas
import tapas.api
import tapas.capture.program
from tapas._torch import whole_tensor
from tapas.errors import PlanError, TapasError
from tapas.plan.plan import Plan
from tapas.planner.fit import search
from tapas.planner.pipeline import described, pose
from tapas.planner.request import Request
from tapas.planner.solution import Solution
from tapas.problem.problem import OpVariable, Problem
from tapas.verify.subject import disturb
from tapas.verify.verification import Report
from tests.distributed.small import EAGER
from tests.faithful.case import Call, Case
from tests.faithful.ranks import Rank, Ranks

Meshes = Callable[[tuple[int, ...]], Ranks]  # the ranks of a mesh

STEPS, RATE = 3, 0.1
LARGE = 1e6
TRIES = 40  # random choices may exclude each other

# -- what is seen of a module -------------------------------------------------------------------------


@dataclass
class Record:
    """All that a user can see, by where it is seen."""

    seen: dict[str, Any] = field(default_factory=dict)

    def note(self, place: str, value: Any) -> None:
        for path, leaf in leaves(value, place):
            self.seen[path] = whole(leaf) if isinstance(leaf, torch.Tensor) else leaf


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Tensors and other ends of nested values, and what each node is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = [(f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        children = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (tuple, list)):
        children = [(f"[{i}]", item) for i, item in enumerate(value)]
    else:
        yield path, value
        return
    yield f"type({path})", type(value).__name__
    for name, child in children:
        yield from leaves(child, path + name)


def whole(x: torch.Tensor) -> torch.Tensor:
    return (whole_tensor(x.detach()) if isinstance(x, DTensor) else x.detach()).clone()


def loss_of(case: Case, output: Any) -> torch.Tensor:
    if case.loss is not None:
        return case.loss(output)
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output["loss"]
    return output.loss if hasattr(output, "loss") else output[0]


def train(case: Case, module: nn.Module, calls: list[Call]) -> Record:
    """A training loop as everybody writes it, or as many calls for a module that is not trained."""
    record = Record()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE) if case.train else None
    for step, given in enumerate(calls):
        if case.before is not None:
            case.before(module, step)
        with case.around() if case.around else nullcontext(), torch.set_grad_enabled(case.train):
            output = module(*given.args, **given.kwargs)
            loss = loss_of(case, output) if optimizer is not None else None
        record.note(f"step {step}: output", output)
        if optimizer is not None and loss is not None:
            optimizer.zero_grad()
            record.note(f"step {step}: loss", loss)
            loss.backward()
            for name, parameter in module.named_parameters():
                record.note(f"step {step}: gradient of {name}", parameter.grad)
            for path, value in leaves((given.args, given.kwargs), "input"):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    record.note(f"step {step}: gradient of {path}", value.grad)
            optimizer.step()
        for name, buffer in module.named_buffers():
            record.note(f"step {step}: buffer {name}", buffer)
    for name, value in module.state_dict().items():
        record.note(f"state {name}", value)
    return record


def differences(wanted: Record, found: Record, tolerance: float) -> list[str]:
    """In words, the first ones first: later ones follow from them."""
    said = [f"{place} is missing" for place in wanted.seen if place not in found.seen]
    said += [f"{place} is not the original's" for place in found.seen if place not in wanted.seen]
    for place, value in wanted.seen.items():
        if place in found.seen and (fact := _difference(value, found.seen[place], tolerance)):
            said.append(f"{place} {fact}")
    return said


def _difference(wanted: Any, found: Any, tolerance: float) -> str:
    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        if isinstance(wanted, torch.Tensor) != isinstance(found, torch.Tensor):
            kinds = [type(x).__name__ if x is not None else "None" for x in (found, wanted)]
            return "is a {}, in the original a {}".format(*kinds)
        return "" if wanted == found else f"is {found!r}, in the original {wanted!r}"
    if wanted.shape != found.shape:
        return f"has shape {tuple(found.shape)}, in the original {tuple(wanted.shape)}"
    if wanted.dtype != found.dtype:
        return f"is {found.dtype}, in the original {wanted.dtype}"
    if not wanted.numel() or torch.equal(wanted, found):
        return ""
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    wanted, found = wanted.to(wide), found.to(wide)
    scale = float(wanted.abs().nan_to_num(0, 0, 0).max())
    if torch.isclose(found, wanted, tolerance, tolerance * max(scale, 1.0), equal_nan=True).all():
        return ""
    return f"is off by {float((found - wanted).abs().nan_to_num(torch.inf).max()):.2g}"


# -- plans --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A mesh and what is split: the batch, the tensors, or whatever chance says."""

    mesh: tuple[int, ...]
    split: str  # "batch", "tensor" or "random"
    seed: int = 0

    def __str__(self) -> str:
        number = f" {self.seed}" if self.split == "random" else ""
        return f"{'x'.join(map(str, self.mesh))} {self.split}{number}"


SETTINGS = (
    Setting((2,), "batch"), Setting((2,), "tensor"), Setting((2,), "random", 1),
    Setting((2, 2), "batch"), Setting((2, 2), "tensor"), Setting((2, 2), "random", 2),
)  # fmt: skip
PINS = {"batch": {"pins": {"*": "ddp"}}, "tensor": {"pins": {"*": "megatron"}}}
FREE = {"batch": {}, "tensor": {"batch_split": False}}  # where a module has nothing that the pin could be about


def example_inputs(module: nn.Module, given: Call) -> tuple[Any, ...] | dict[str, Any]:
    """Arguments as planning takes them: all by position, or all by name."""
    if not given.args or not given.kwargs:
        return given.kwargs or given.args
    return dict(inspect.signature(module.forward).bind(*given.args, **given.kwargs).arguments)


def plan_for(case: Case, module: nn.Module, given: Call, setting: Setting) -> Plan:
    training = True if case.train and case.loss is not None else None
    options: dict[str, Any] = {"cluster": EAGER, "memory": None, "training": training}
    inputs = example_inputs(module, given)
    if setting.split == "random":
        return _random_plan(module, inputs, Request.of(setting.mesh, baselines=False, **options), setting.seed)
    options |= {"mesh": setting.mesh, "baselines": False}
    try:
        return tapas.plan(module, inputs, **options, **PINS[setting.split])
    except PlanError:
        return tapas.plan(module, inputs, **options, **FREE[setting.split])


def _random_plan(module: nn.Module, inputs: Any, request: Request, seed: int) -> Plan:
    from tapas.capture import capture

    graph = capture(module, inputs, training=request.training)
    problem, _ = pose(graph, request)
    return described(_random_choices(problem, np.random.default_rng(seed)), graph, request)


def _random_choices(problem: Problem, random: np.random.Generator) -> Solution:
    """The best of what is left when most choices of every operator are taken away at random."""
    operators = [
        ((b, v), len(variable.table))
        for b, part in enumerate(problem.blocks)
        for v, variable in enumerate(part.variables)
        if isinstance(variable, OpVariable)
    ]
    for _ in range(TRIES):
        rows = {key: np.sort(random.choice(n, size=max(1, n // 6), replace=False)) for key, n in operators}
        try:
            return search(problem, rows)
        except PlanError:
            continue
    return search(problem)


def verified(case: Case, setting: Setting, steps: int = 2, noise: bool = False) -> Report:
    """What verify says, ranks as threads; `noise`: weights of ones, of which every rank has the same, get some."""
    with numbers_of(case), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = made(case)
        if noise:
            disturb(model)
        inputs = example_inputs(model, calls_of(case)[0])
        training = True if case.train and case.loss is not None else None
        options: dict[str, Any] = {"cluster": EAGER, "training": training, "in_process": True, "steps": steps}
        try:
            return tapas.verify(model, inputs, mesh=setting.mesh, **options, **PINS[setting.split])
        except PlanError:
            return tapas.verify(model, inputs, mesh=setting.mesh, **options, **FREE[setting.split])


# -- both of them -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    kind: str  # "passes", "refused", "wrong" or "traceback"; "unusable": the original fails; "unstable": see there
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


@contextmanager
def captured_once() -> Iterator[None]:
    """All plans and all ranks of a module share its capture, which takes longer than all the rest. Whether torch is
    exporting is known to the whole process: while one rank captures, the others wait."""
    original = tapas.capture.program.capture_program
    known: dict[tuple[int, bool | None], tuple[nn.Module, Any]] = {}

    def shared(model: nn.Module, inputs: Any, *, training: bool | None = None, name: str = "", **options: Any) -> Any:
        if (id(model), training) not in known:
            here = threading.current_thread()
            capture = partial(original, model, inputs, training=training, name=name, **options)
            captured = here.together(capture) if isinstance(here, Rank) else capture()
            # the model is kept: another one might get its number
            known[id(model), training] = known[id(model), captured.graph.training] = model, captured
        return known[id(model), training][1]

    homes = (tapas.capture.program, tapas.api)
    for home in homes:
        home.capture_program = shared  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for home in homes:
            home.capture_program = original  # type: ignore[attr-defined]


@contextmanager
def numbers_of(case: Case) -> Iterator[None]:
    """The precision of a case; random numbers are everybody's own afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(case.dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(before)


def made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make()


def calls_of(case: Case) -> list[Call]:
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        found.append(case.inputs())
    return found


def verdict(case: Case, setting: Setting, ranks: Meshes) -> Verdict:
    """Of a module that nobody has looked at: it may be of no use, or blow rounding up."""
    (found,) = verdicts(case, (setting,), ranks).values()
    return Verdict("unstable") if found.kind == "wrong" and unstable(case) else found


def unstable(case: Case) -> bool:
    """Whether weights that differ by rounding give other results than the tolerance allows, without any splitting; or
    numbers are so large that what cancels out does not within it."""
    with numbers_of(case), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact, rounded = made(case), made(case)
        with torch.no_grad():
            for parameter in rounded.parameters():
                parameter.mul_(1 + 1e-15 * torch.randint(-2, 3, parameter.shape))
        records = [train(case, module, copy.deepcopy(calls_of(case))) for module in (exact, rounded)]
    taught = [value for place, value in records[0].seen.items() if ": loss" in place or ": gradient" in place]
    tensors = [value for value in taught if isinstance(value, torch.Tensor) and value.numel()]
    large = any(not float(value.abs().max()) < LARGE for value in tensors)
    return large or bool(differences(*records, case.tolerance))


def verdicts(
    case: Case, settings: tuple[Setting, ...], ranks: Meshes, to_the_end: bool = False
) -> dict[Setting, Verdict]:
    """What comes of a case in each setting, up to the first in which it is not what it should be."""
    found: dict[Setting, Verdict] = {}
    with numbers_of(case), captured_once(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says about a user's module is the user's business
        try:
            wanted = train(case, made(case), copy.deepcopy(calls_of(case)))
        except Exception as error:
            return {setting: Verdict("unusable", str(error)) for setting in settings}
        model = made(case)
        for setting in settings:
            found[setting] = _judged(case, model, setting, ranks(setting.mesh), wanted)
            if not (to_the_end or as_wanted(case, found[setting])):
                break
    return found


def as_wanted(case: Case, found: Verdict) -> bool:
    if case.refused is None:
        return found.kind == "passes"
    return found.kind == "refused" and case.refused in found.text


def _judged(case: Case, model: nn.Module, setting: Setting, ranks: Ranks, wanted: Record) -> Verdict:
    calls = calls_of(case)
    try:
        plan = plan_for(case, model, calls[0], setting)

        def work(mesh: DeviceMesh) -> Record:
            return in_parallel(case, model, calls, plan, mesh)

        for rank, found in enumerate(ranks(work)):
            if said := differences(wanted, found, case.tolerance):
                more = f", and {len(said) - 1} more" if len(said) > 1 else ""
                return Verdict("wrong", f"rank {rank}: {said[0]}{more}")
    except TapasError as error:
        return Verdict("refused", str(error))
    except Exception as error:  # the case has failed, whatever it is
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
        words = (str(error).strip().splitlines() or [""])[0]
        return Verdict("traceback", f"{type(error).__name__}: {words} at {place}")
    return Verdict("passes")


def in_parallel(case: Case, model: nn.Module, calls: list[Call], plan: Plan, mesh: DeviceMesh) -> Record:
    """What one rank sees."""
    calls = copy.deepcopy(calls)
    module = tapas.parallelize(model, example_inputs(model, calls[0]), mesh=mesh, plan=plan)
    return train(case, module, calls)
