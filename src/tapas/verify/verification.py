"""`tapas verify`: run the original model and the parallel program side by side, and compare all they do."""

from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from torch import nn

from tapas.cost.collectives import ClusterRouter
from tapas.errors import CaptureError, PlanError, TapasError
from tapas.hardware.mesh import Mesh
from tapas.ir.capacity import capacity_of
from tapas.ir.graph import Graph
from tapas.models.source import ModelSource
from tapas.plan.assignment import Assignment
from tapas.plan.plan import Plan
from tapas.planner.assignment import choices_of
from tapas.planner.memory import MemoryModel, Peak
from tapas.planner.pipeline import decided, router_of, tp_hints
from tapas.planner.request import Request
from tapas.problem.build import build_problem
from tapas.util import Progress, silent
from tapas.verify.blame import Culprit, blame
from tapas.verify.homes import homes_of, refuse_within_import
from tapas.verify.judge import BUFFERS, CAPTURE, TOLERANCE, Error, judge
from tapas.verify.launches import predicted_launches
from tapas.verify.original import replayed, run_module
from tapas.verify.precision import default_dtype
from tapas.verify.processes import RankFailed, run_in_processes
from tapas.verify.steps import Outcome
from tapas.verify.subject import (
    COPIES,
    Subject,
    capture_subject,
    check_size,
    disturb,
    silent_folded,
    silent_graph,
    with_weights,
)
from tapas.verify.threads import run_in_threads
from tapas.verify.trace import Trace, TraceRequest, trace_step
from tapas.verify.traffic import SentBytes, busiest, compare_traffic
from tapas.verify.trial import PRECISIONS, Coord, Trial, lifted_folded, unplaced

FLAT = 1e-30  # a gradient
LITTLE = 0.2  # of the operators
PINS = ("megatron", "ddp", "fsdp")
DEFECT = "this is a defect of TAPAS: please report the model"

__all__ = ["Check", "RankFailed", "Report", "verify_model", "verify_source"]


@dataclass(frozen=True)
class Check:
    what: str
    errors: dict[str, float]  # relative, by precision; and of the module itself against its graph
    where: str  # the worst place, in float64
    compared: int

    @property
    def ok(self) -> bool:
        return all(error <= TOLERANCE[precision] for precision, error in self.errors.items())


@dataclass(frozen=True)
class Used:
    """Memory at its peak, on the device that needs most; nothing was measured without two steps or more."""

    predicted_nbytes: int
    measured_nbytes: int


@dataclass(frozen=True)
class Launched:
    """In one step, on the rank where it is furthest off: messages, and copies into buffers and out of them. Tensors
    that do not lie in memory in the order of their dims may need one more, or one less."""

    predicted_messages: int
    messages: int
    predicted_copies: int
    copies: int
    strided: int

    @property
    def ok(self) -> bool:
        return self.predicted_messages == self.messages and self.excess == 0

    @property
    def excess(self) -> int:
        return max(0, abs(self.copies - self.predicted_copies) - self.strided)


@dataclass(frozen=True)
class Advice:
    """A pin under which more would be tested."""

    pin: str
    split: tuple[int, int]  # operators that are split then, all operators


@dataclass(frozen=True)
class Report:
    model: str
    mesh: Mesh
    how: str  # "processes" or "threads"
    steps: int
    checks: tuple[Check, ...]
    sent: dict[str, tuple[SentBytes, ...]]  # by precision
    silenced: tuple[str, ...]
    split: tuple[int, int]  # operators that are split, all operators
    culprit: Culprit | None = None
    memory: dict[str, Used] = field(default_factory=dict)  # by precision
    advice: Advice | None = None  # where little is split
    launched: dict[str, Launched] = field(default_factory=dict)  # by precision
    trace: Trace | None = None  # if it was asked for, and all agrees
    busiest: dict[str, float] = field(default_factory=dict)  # by axis over which tokens are sent to their experts
    flat: bool = False  # all gradients of the original are zero, or too small to tell a wrong one from a right one

    @property
    def little(self) -> bool:
        """Whether so few operators are split that hardly anything was tested."""
        return _little(self.split)

    @property
    def ok(self) -> bool:
        sent = [*self.sent.values(), self.trace.sent if self.trace is not None else ()]
        agreed = all(s.ok for some in sent for s in some) and all(some.ok for some in self.launched.values())
        return agreed and all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok, "model": self.model, "mesh": {"names": self.mesh.names, "sizes": self.mesh.sizes},
            "ranks": self.how, "steps": self.steps, "tolerances": TOLERANCE,
            "checks": [asdict(check) | {"ok": check.ok} for check in self.checks],
            "collectives": {p: [asdict(s) | {"ok": s.ok} for s in sent] for p, sent in self.sent.items()},
            "launched": {p: asdict(some) | {"ok": some.ok} for p, some in self.launched.items()},
            "silenced": self.silenced, "split_operators": self.split[0], "operators": self.split[1],
            "memory": {p: asdict(used) for p, used in self.memory.items()},
            "first_difference": asdict(self.culprit) if self.culprit else None,
            "little_tested": self.little, "advice": asdict(self.advice) if self.advice else None,
            "trace": self.trace.to_dict() if self.trace else None,
        }  # fmt: skip


def verify_model(
    model: nn.Module, example_inputs: Any, asked: Request | Plan, *, in_process: bool = False, steps: int = 3,
    timeout: float = 120.0, name: str = "", trace: TraceRequest | None = None,
) -> Report:  # fmt: skip
    """Check a plan, or the best one for a request, with the model's own weights and data."""
    refuse_within_import()
    model = with_weights(model)
    name = name or type(model).__name__
    subject = capture_subject(model, example_inputs, asked.training, name, asked.losses, asked.capacity)
    assignment = decided(subject.graph, subject.folded, asked, tp_hints(model))
    report = examine(
        subject, assignment, router_of(asked), in_process=in_process, steps=steps, timeout=timeout, trace=trace,
        remedy="give a smaller model and inputs",
    )  # fmt: skip
    return _advised(report, subject, router_of(asked))


def verify_source(
    source: ModelSource, request: Request, plan: Plan | None = None, *, in_process: bool = False, steps: int = 3,
    timeout: float = 120.0, trace: TraceRequest | None = None, progress: Progress = silent,
) -> Report:  # fmt: skip
    """The same for what was asked on the command line; weights and data are random."""
    from tapas.models.load import smaller

    progress("load")
    light = source.load(request.training)
    parameters = sum(p.numel() for p in light.model.parameters())
    remedy = smaller(light, planned=plan is not None)
    check_size(source.model, parameters, request.mesh.devices, remedy=remedy)
    loaded = source.load(request.training, device="cpu")
    model = with_weights(loaded.model)
    disturb(model)
    progress("capture")
    try:
        subject = capture_subject(model, loaded.inputs, request.training, source.model, capacity=request.capacity)
    except CaptureError as error:
        raise source.blamed(error) from error
    assignment = decided(subject.graph, subject.folded, plan or request, tp_hints(model), progress)
    report = examine(
        subject, assignment, router_of(request), in_process=in_process, steps=steps, timeout=timeout, trace=trace,
        progress=progress, remedy=remedy,
    )  # fmt: skip
    return _advised(report, subject, router_of(request))


def examine(
    subject: Subject, assignment: Assignment, router: ClusterRouter, *, in_process: bool = False, steps: int = 3,
    timeout: float = 120.0, trace: TraceRequest | None = None, progress: Progress = silent, remedy: str = "",
) -> Report:  # fmt: skip
    """Run and compare one plan; `remedy` is for one that is too large."""
    mesh = router.mesh
    graph, silenced = silent_graph(subject.graph)
    homes = homes_of(subject.model, graph)
    trial = Trial(graph, silent_folded(subject.folded), mesh, assignment, subject.leaves(), steps, homes)
    peaks = {precision: _peak(trial, precision, router) for precision in PRECISIONS}
    _check_memory(subject, mesh, peaks["float64"], remedy)
    trials = {precision: trial.at(precision) for precision in PRECISIONS}
    progress("run the original")
    errors = {CAPTURE: _of_capture(subject, steps)}
    references = {p: _reference(t, p) for p, t in trials.items()}
    progress(f"run {mesh.devices} ranks")
    ranks = _run(trial, trials, in_process, timeout)
    progress("compare")
    finer = {"float32": references.get("float64")}
    errors |= {p: _of_ranks(trials[p], references[p], ranks[p], p, finer.get(p)) for p in PRECISIONS}
    checks = _checks(errors)
    sent = {
        p: compare_traffic(trials[p].folded, assignment, mesh.names, [o.sent for o in ranks[p].values()])
        for p in PRECISIONS
    }
    culprit = None if all(check.ok for check in checks) else _blamed(trials["float64"]) or _unwritten(graph, checks)
    how = "threads" if in_process else "processes"
    buffers = capacity_of(op for block in trial.folded.blocks for op in block.ops)  # of which all ranks get the same
    report = Report(
        subject.graph.name, mesh, how, steps, checks, sent, silenced, _split(assignment), culprit,
        {p: Used(peaks[p].nbytes, max(o.peak_nbytes for o in ranks[p].values())) for p in PRECISIONS},
        launched={p: _launched(trials[p], ranks[p]) for p in PRECISIONS}, flat=_flat(references["float64"]),
        busiest={} if buffers else busiest(assignment, mesh.names, [o.sent for o in ranks["float64"].values()]),
    )  # fmt: skip
    if trace is None or not report.ok:
        return report
    progress("record a step")
    own = replace(trial, graph=subject.graph, folded=subject.folded)  # as it is, with its dropout
    return replace(report, trace=trace_step(own, trace, timeout))


def _flat(reference: Outcome) -> bool:
    gradients = [x for x in reference.gradients.values() if x.numel()]
    return bool(gradients) and max(float(x.abs().max()) for x in gradients) < FLAT


def _launched(trial: Trial, ranks: dict[Coord, Outcome]) -> Launched:
    found: list[Launched] = []
    for coord, outcome in ranks.items():
        planned = predicted_launches(trial.folded, trial.assignment, coord)
        found.append(Launched(
            sum(planned.messages.values()), sum(outcome.sent.launches.values()),
            sum(planned.copies.values()), sum(outcome.sent.copies.values()), sum(outcome.sent.strided.values()),
        ))  # fmt: skip
    return max(found, key=lambda some: (abs(some.predicted_messages - some.messages), some.excess, some.copies))


def _of_capture(subject: Subject, steps: int) -> list[Error]:
    """The module itself against the graph that was captured of it. Both call the same operators in the same order: it
    is the one comparison that needs no other precision than the model's own."""
    graph, leaves = subject.graph, subject.leaves()
    return judge(
        graph, unplaced(graph), replayed(graph, leaves, steps), {(): run_module(subject, steps)}, TOLERANCE[CAPTURE],
        lambda seed: replayed(graph, leaves, steps, seed),
    )  # fmt: skip


def _reference(trial: Trial, precision: str) -> Outcome:
    try:
        with default_dtype(precision):
            return replayed(trial.graph, trial.leaves, trial.steps)
    except TapasError:
        raise
    except Exception as error:  # an operator that is not there in this precision, or a constant that was not widened
        fact = f"its graph cannot be run in {precision}: {_words(error)}"
        raise TapasError(trial.graph.name, fact, DEFECT) from error


def _of_ranks(
    trial: Trial, reference: Outcome, ranks: dict[Coord, Outcome], precision: str, finer: Outcome | None
) -> list[Error]:
    with default_dtype(precision):
        return judge(
            trial.graph, trial.placed, reference, ranks, TOLERANCE[precision],
            lambda seed: replayed(trial.graph, trial.leaves, trial.steps, seed), finer,
        )  # fmt: skip


def _blamed(trial: Trial) -> Culprit | None:
    with default_dtype("float64"):
        return blame(trial)


def _run(trial: Trial, trials: dict[str, Trial], in_process: bool, timeout: float) -> dict[str, dict[Coord, Outcome]]:
    if not in_process:
        return _by_precision(run_in_processes(trial, timeout), trial.mesh)
    try:
        return {precision: _in_threads(trials[precision], precision) for precision in PRECISIONS}
    except TapasError:
        raise
    except Exception as error:  # as a rank that is a process would fail
        raise RankFailed(trial.graph.name, f"a rank failed: {_words(error)}", DEFECT) from error


def _in_threads(trial: Trial, precision: str) -> dict[Coord, Outcome]:
    with default_dtype(precision):
        return run_in_threads(trial)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _unwritten(graph: Graph, checks: tuple[Check, ...]) -> Culprit | None:
    """The operator whose result a buffer should have become, where all results are right."""
    wrong = {check.where: max(check.errors.values()) for check in checks if check.what == BUFFERS and not check.ok}
    for buffer, value in graph.writes:
        path = graph.leaf_of[buffer].paths[0]
        if path in wrong and value in graph.producers:
            op = graph.producers[value]
            return Culprit(op.name, op.target, op.module, f"write to {path}", "R", wrong[path])
    return None


def _peak(trial: Trial, precision: str, router: ClusterRouter) -> Peak:
    """The memory that a plan is predicted to need in a precision; this does not depend on prices."""
    folded = replace(trial.folded, found=dict(trial.assignment.found))
    problem = build_problem(lifted_folded(folded, precision), router)
    choices = choices_of(problem, trial.assignment)
    assert choices is not None, "an assignment that fits a graph is one of its problem's"
    return MemoryModel(problem).peak(choices)


def _check_memory(subject: Subject, mesh: Mesh, peak: Peak, remedy: str) -> None:
    """Weights, gradients and both moments are float64 here."""
    parameters = sum(subject.graph.tensors[leaf.tensor].elements for leaf in subject.graph.parameters())
    share = float(peak.kinds["activations"] + COPIES * peak.kinds["weights"])
    check_size(subject.graph.name, parameters, mesh.devices, share, remedy)


def _by_precision(made: list[list[Outcome]], mesh: Mesh) -> dict[str, dict[Coord, Outcome]]:
    """Ranks are numbered row-major, as torch's device mesh does."""
    coords = list(product(*map(range, mesh.sizes)))
    return {p: {coord: made[r][i] for r, coord in enumerate(coords)} for i, p in enumerate(PRECISIONS)}


def _checks(errors: dict[str, list[Error]]) -> tuple[Check, ...]:
    """What ranks are wrong about, in float64, is where to look; else what capture is."""
    made: list[Check] = []
    for row in zip(*errors.values(), strict=True):
        by_name = dict(zip(errors, row, strict=True))
        worst = max(by_name, key=lambda p: (by_name[p].relative > TOLERANCE[p], p == "float64", p == "float32"))
        relative = {p: by_name[p].relative for p in (*PRECISIONS, CAPTURE)}
        made.append(Check(row[0].what, relative, by_name[worst].where, row[0].compared))
    return tuple(made)


def _split(assignment: Assignment) -> tuple[int, int]:
    """How much of the model is split at all: a plan that splits nothing passes every check."""
    choices = [op.choice for copy in assignment.copies for op in assignment.decisions[copy].operators]
    return sum(any(text not in ("R", "B") for text in choice) for choice in choices), len(choices)


def _little(split: tuple[int, int]) -> bool:
    return split[0] < LITTLE * split[1]


def _advised(report: Report, subject: Subject, router: ClusterRouter) -> Report:
    return replace(report, advice=_advice(subject, router)) if report.little else report


def _advice(subject: Subject, router: ClusterRouter) -> Advice | None:
    """The first of the known strategies that splits enough."""
    for name in PINS:
        request = Request.of(
            router.mesh, router.cluster, training=subject.graph.training, pins={"*": name}, memory=None, baselines=False
        )
        try:
            split = _split(decided(subject.graph, subject.folded, request, tp_hints(subject.model)))
        except PlanError:
            continue
        if not _little(split):
            return Advice(f"*={name}", split)
    return None
