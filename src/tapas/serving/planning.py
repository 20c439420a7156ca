"""Prefill and decode planned together: each may be the one that says how weights and cache are held.

The two programs share their weights and their cache, and nothing else: so a plan for both is a plan for each of them
that agrees on these. The best plan of one is taken, and the best plan of the other one among those that hold weights
and cache so; then the other way round. What both take at their best, each for itself, is a bound for all such pairs.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tapas.capture import capture_program
from tapas.capture.program import Captured
from tapas.errors import PlanError, TapasError
from tapas.hardware.mesh import Mesh
from tapas.ir.fold import Folded
from tapas.ir.graph import Graph
from tapas.ir.patterns import container, spans
from tapas.plan.assignment import resident_layouts, weight_layouts
from tapas.planner.assignment import assignment_of
from tapas.planner.fit import LimitedProblem
from tapas.planner.pipeline import Hints, described, tp_hints, within
from tapas.planner.request import Request
from tapas.planner.solution import Solution
from tapas.problem.baselines import STRATEGIES
from tapas.problem.build import build_problem
from tapas.problem.pins import common
from tapas.problem.problem import OpVariable, Problem, Rows, WeightVariable
from tapas.serving.plans import PhaseFigures, ServingPlan
from tapas.serving.step import GenerationStep, generation_step
from tapas.serving.workload import Workload
from tapas.sharding.layout import Layout, R, as_values, local_shape
from tapas.util import Progress, paused, silent

Held = Mapping[str, Layout]  # weights and buffers, by path


@dataclass(frozen=True, slots=True)
class Phase:
    """One of the two programs, and the plans it may have."""

    captured: Captured
    limits: LimitedProblem
    posed: Callable[[Sequence[str]], LimitedProblem]  # with copies apart that match these patterns

    def following(self, led: Solution) -> Solution:
        """The best plan that holds weights and cache as another program does, copy by copy."""
        held = held_by(led)
        patterns = unlike_copies(self.limits.problem.folded, held)
        phase = replace(self, limits=self.posed(patterns)) if patterns else self
        return phase.best(held)

    @property
    def graph(self) -> Graph:
        return self.captured.graph

    @property
    def buffers(self) -> set[str]:
        return {leaf.tensor for leaf in self.graph.leaves if leaf.kind == "buffer"}

    def best(self, held: Held, strategy: str = "") -> Solution:
        """Whose tokens every rank has, and that holds weights and cache so, as far as that is said."""
        constraints = self.limits.constraints

        def further(problem: Problem, rows: Rows) -> Rows:
            if strategy:
                rows = common(problem, STRATEGIES[strategy](problem, constraints.hints), rows, strategy)
            return held_rows(problem, whole_outputs(problem, rows), held)

        return self.limits.best(further, insist=not strategy)

    def on(self, mesh: Mesh, request: Request) -> "Phase":
        """The same on another mesh."""
        problem = build_problem(self.limits.problem.folded, request.router(mesh), request.optimizer)
        rows = self.limits.constraints.rows(problem)
        return replace(self, limits=replace(self.limits, problem=problem, rows=rows, learnt={}))


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Solution
    decode: Solution

    def seconds(self, workload: Workload) -> float:
        return self.prefill.answer.cost + workload.steps * self.decode.answer.cost


def captured_phases(step: GenerationStep, name: str = "") -> tuple[Captured, Captured]:
    """Prefill and decode."""
    name = name or type(step).__name__
    prefill, decode = (_captured(step, name, decode) for decode in (False, True))
    return prefill, decode


def _captured(step: GenerationStep, name: str, decode: bool) -> Captured:
    """Again, if it shows that layers cache keys and values of another shape than is usual."""
    for _ in range(2):
        captured = capture_program(step, step.inputs(decode), training=False, name=name)
        if not step.cached[0].measured:
            fact = "makes no mask of all places of its cache, of which some are not filled yet"
            raise TapasError(name, fact, "serve it with transformers")
        read = next((read for read in captured.known.reads if not read.asserted), None)
        if read is not None and captured.known.sources:
            sources = ", ".join(captured.known.sources)
            fact = f"sizes or branches depend on values of {sources}, which are others at every token"
            raise TapasError(read.place, fact, "serve it with transformers")
        own, cross = (homes.fit(step.device) for homes in step.cached)
        if not own and not cross:
            return captured
    raise TapasError(name, "adds other keys and values to its cache at every call", "serve it with transformers")


def posed_phase(captured: Captured, request: Request, hints: Hints | None, progress: Progress) -> Phase:
    def posed(apart: Sequence[str]) -> LimitedProblem:
        return within(captured.graph, request, hints, progress, apart)

    return Phase(captured, posed(()), posed)


@paused
def plan_serving(
    model: Any, workload: Workload, request: Request, name: str = "", progress: Progress = silent
) -> ServingPlan:
    request = replace(request, training=False)
    progress("capture")
    step = generation_step(model, workload)
    hints = tp_hints(model)
    phases = [posed_phase(captured, request, hints, progress) for captured in captured_phases(step, name)]
    prefill, decode = phases
    progress("search")
    pair, bound = searched(prefill, decode, workload)
    first, second = (described(s, p.graph, request) for s, p in ((pair.prefill, prefill), (pair.decode, decode)))
    layouts = held_by(pair.prefill)
    weights, cache = held_bytes(prefill, layouts)
    patterns = cache_patterns(layouts, prefill.buffers)
    degrees = tensor_parallel(prefill, decode, request, progress) if request.baselines else {}
    return ServingPlan(workload, first, second, bound, weights, cache, patterns, degrees)


def searched(prefill: Phase, decode: Phase, workload: Workload) -> tuple[Pair, float]:
    """The better of the two pairs, and the seconds that no pair is below."""
    first, second = prefill.best({}), decode.best({})
    pairs: list[Pair] = []
    why: PlanError | None = None
    for led in (True, False):
        try:
            pairs.append(Pair(prefill.following(second), second) if led else Pair(first, decode.following(first)))
        except PlanError as error:
            why = error
    if not pairs:
        assert why is not None
        raise why
    bound = first.answer.bound + workload.steps * second.answer.bound
    return min(pairs, key=lambda pair: pair.seconds(workload)), bound


def tensor_parallel(
    prefill: Phase, decode: Phase, request: Request, progress: Progress
) -> dict[int, PhaseFigures | str]:
    """At every degree; the batch is dealt out over the other devices."""
    devices, found = request.mesh.devices, dict[int, PhaseFigures | str]()
    for degree in (n for n in range(1, devices + 1) if devices % n == 0):
        progress(f"compare with tensor parallelism over {degree}")
        sizes = (devices // degree, degree) if 1 < degree < devices else (devices,)
        strategy = "ddp" if degree == 1 and devices > 1 else "megatron"
        try:
            there = [phase.on(Mesh(sizes), request) for phase in (prefill, decode)]
            second = there[1].best({}, strategy)
            pair = Pair(there[0].best(held_by(second), strategy), second)
            nbytes = max(sum(s.memory().values()) for s in (pair.prefill, pair.decode))
            found[degree] = PhaseFigures(pair.prefill.answer.cost, pair.decode.answer.cost, nbytes)
        except PlanError as error:
            found[degree] = error.fact
    return found


# -- what both have in common ------------------------------------------------------------------------


def held_by(solution: Solution) -> Held:
    assignment, folded = assignment_of(solution), solution.problem.folded
    weights = weight_layouts(assignment, folded)
    by_path = {
        path: weights[leaf.tensor] for leaf in folded.parameters if leaf.tensor in weights for path in leaf.paths
    }
    return by_path | resident_layouts(assignment, folded)


def unlike_copies(folded: Folded, held: Held) -> list[str]:
    """Patterns of the copies that hold what is theirs otherwise than most copies of their block do; the program that
    says how it is held may have other blocks."""
    alike: dict[int, dict[tuple, list[str]]] = defaultdict(lambda: defaultdict(list))
    for copy in folded.copies:
        mine = (*copy.weights, *copy.constants)
        alike[copy.block][tuple(held.get(name) for name in mine)].append(copy.path)
    found: list[str] = []
    for groups in alike.values():
        _, *others = sorted(groups.values(), key=len, reverse=True)
        for paths in others:
            places = [container(path) for path in paths]
            for name in dict.fromkeys(place[0] for place in places if place is not None):
                numbers = [place[1] for place in places if place is not None and place[0] == name]
                found.append(f"{name}.{{{spans(numbers)}}}")
    return found


def whole_outputs(problem: Problem, rows: Rows) -> Rows:
    """Every rank needs the logits: it chooses tokens as the others do."""
    found = dict(rows)
    for b, part in enumerate(problem.blocks):
        for v in part.outputs.values():
            variable: Any = part.variables[v]
            whole = variable.space.find((R,) * len(problem.router.mesh.sizes))
            found[b, v] = np.flatnonzero(variable.allowed == whole)
    return found


def held_rows(problem: Problem, rows: Rows, held: Held) -> Rows:
    """What is left if weights and caches are held so, by path; those of which nothing is said are free."""
    folded, found = problem.folded, dict(rows)
    for copy in folded.copies:
        part = problem.blocks[copy.block]
        constants = dict(zip(part.block.constants, copy.constants, strict=True))
        weights = dict(zip(part.block.weights, copy.weights, strict=True))
        for v, variable in enumerate(part.variables):
            match variable:
                case WeightVariable():
                    path = folded.leaf_of[weights[variable.tensor.name]].paths[0]
                    if path in held:
                        left = np.flatnonzero(variable.stored == variable.space.find(held[path]))
                        _narrow(found, (copy.block, v), left, path)
                case OpVariable() if variable.rule.resident is not None:
                    path = constants[variable.op.operands[variable.rule.resident]]
                    if path in held:
                        _narrow(found, (copy.block, v), _held_so(variable, held[path]), path)
                case _:
                    pass
    return found


def _held_so(variable: OpVariable, layout: Layout) -> np.ndarray:
    operand, table = variable.rule.resident, variable.table
    assert operand is not None
    return np.array([i for i in range(len(table)) if as_values(table.choice(i).operand(operand)) == layout], int)


def _narrow(found: dict[tuple[int, int], np.ndarray], key: tuple[int, int], left: np.ndarray, path: str) -> None:
    left = np.intersect1d(left, found[key]) if key in found else left
    if not len(left):
        fact = "the other program of the two cannot use it as this one holds it, or holds its copies differently"
        raise PlanError(path, fact, "give more memory, or another mesh")
    found[key] = left


def held_bytes(phase: Phase, held: Held) -> tuple[int, int]:
    """Of weights and cache, on the device that has most."""
    folded, mesh = phase.limits.problem.folded, phase.limits.problem.router.mesh.sizes
    origin = (0,) * len(mesh)  # shards are those of torch.chunk: the first is as large as any
    total = {"parameter": 0, "buffer": 0}
    for leaf in phase.graph.leaves:
        layout = held.get(leaf.paths[0]) if leaf.paths else None
        tensor = folded.tensors[leaf.tensor]
        if leaf.kind == "parameter" or layout is not None:
            part = local_shape(tensor.shape, layout or (R,) * len(mesh), mesh, origin)
            total[leaf.kind] += int(np.prod(part, dtype=int)) * tensor.nbytes // max(tensor.elements, 1)
    return total["parameter"], total["buffer"]


def cache_patterns(held: Held, buffers: Set[str]) -> dict[str, tuple[str, ...]]:
    """How modules hold their caches, by pattern; of a pattern that holds several ways with the layers' numbers."""
    homes = {path.rpartition(".")[0]: tuple(map(str, layout)) for path, layout in held.items() if path in buffers}
    alike: dict[str, dict[tuple[str, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for home, layout in homes.items():
        alike[_NUMBER.sub(".*", home, count=1)][layout].append(home)
    found: dict[str, tuple[str, ...]] = {}
    for pattern, layouts in alike.items():
        for layout, some in layouts.items():
            numbers = [int(match[1]) for match in map(_NUMBER.search, some) if match is not None]
            found[pattern if len(layouts) == 1 else pattern.replace("*", f"{{{spans(numbers)}}}", 1)] = layout
    return found


_NUMBER = re.compile(r"\.(\d+)(?=\.)")  # of a layer: `model.layers.3.self_attn`
