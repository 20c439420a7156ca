"""The search against an integer program on the unfolded graph, and plans added up operator by operator."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tapas.capture import capture
from tapas.cost.collectives import ClusterRouter
from tapas.hardware.cluster import Link
from tapas.hardware.mesh import parse_mesh
from tapas.ir.capacity import with_capacity
from tapas.ir.fold import fold
from tapas.ir.graph import Graph
from tapas.ir.inline import unfold as written_out
from tapas.planner.fit import search
from tapas.planner.pipeline import plan_graph
from tapas.planner.request import Request
from tapas.planner.solution import Solution
from tapas.problem.build import build_problem
from tapas.problem.factor_pins import forbid
from tapas.problem.pins import pin_mode
from tapas.problem.problem import OpVariable, Problem, TensorVariable, Variable, WeightVariable
from tapas.rules.base import KEEP
from tapas.search import SearchAnswer, cost_of, solve
from tapas.sharding.layout import as_values
from tapas.sharding.routing import LayoutSpace
from tests.distributed.small import EAGER, small
from tests.oracle.highs import evaluate, optimum, unfold
from tests.oracle.optima import (
    CLUSTER,
    MESHES,
    MODELS,
    entry,
    every_choice,
    graph,
    problem,
    solution,
    solved,
    stored_optima,
)
from tests.subjects import small_subject

pytest.importorskip("transformers")

CLOSE = 1e-7  # relative, what the solver's tolerances allow
CASES = list(product(MODELS, (True, False), MESHES))
full = pytest.mark.full


@pytest.fixture(scope="module", params=CASES, ids=[entry(*case) for case in CASES])
def case(request: pytest.FixtureRequest) -> tuple[str, bool, str]:
    """Of the whole module, so that all tests of one case follow each other and it is searched once."""
    return request.param


def on_mesh(mesh: str, quick: Callable[[str, bool], bool] = lambda name, training: training):
    """The cases on one mesh; those that are not `quick` in `make test-full` only."""
    cases = [case for case in CASES if case[2] == mesh]
    marked = [pytest.param(case, marks=() if quick(*case[:2]) else full, id=entry(*case)) for case in cases]
    return pytest.mark.parametrize("case", marked, indirect=True)


# -- the optimum -------------------------------------------------------------------------------------


def test_the_search_finds_the_optimum(case: tuple[str, bool, str]) -> None:
    answer = solution(*case).answer
    assert answer.cost == pytest.approx(stored_optima()[entry(*case)], rel=CLOSE)
    assert answer.gap <= 1e-9 * answer.cost


def _solved_again(name: str, training: bool, mesh: str):
    quick = training and mesh == "4"
    marks = () if quick else full
    return pytest.param((name, training, mesh), marks=marks, id=entry(name, training, mesh))


@pytest.mark.parametrize("case", [_solved_again(*case) for case in CASES], indirect=True)
def test_integer_program(case: tuple[str, bool, str]) -> None:
    """On all choices: also on those that the search leaves out as dominated."""
    assert stored_optima()[entry(*case)] == pytest.approx(solved(*case), rel=CLOSE)


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_tokens_are_sent_to_experts_where_that_is_best(capacity: float | None) -> None:
    """And that it is best is true on all choices."""
    slow = replace(EAGER, intra=Link(1e8, 0.0), inter=Link(1e8, 0.0))
    graph = with_capacity(small_subject("mixtral").graph, capacity)
    part = build_problem(fold(graph), ClusterRouter(parse_mesh("4"), slow))
    found = search(part)
    groups = [(found.part(group).variables, group.choices) for group in found.groups()]
    pairs = [pair for variables, choices in groups for pair in zip(variables, choices, strict=False)]
    chosen = [v.table.choice(i).names for v, i in pairs if isinstance(v, OpVariable)]
    assert ("dispatch",) in chosen
    assert optimum(every_choice(part)).cost == pytest.approx(found.answer.cost, rel=CLOSE)
    without = search(part, forbid(part, "*", "dispatch", {})).answer.cost
    assert without > found.answer.cost * (1 + CLOSE)


def test_neighbours_send_a_window_where_that_is_best() -> None:
    """One sample, so that there is nothing else to split as well; that it is best is true on all choices."""
    model, inputs = small("mistral")
    graph = capture(model, {name: x[:1] for name, x in inputs.items()})
    part = build_problem(fold(graph), ClusterRouter(parse_mesh("4"), EAGER))
    found = search(part)
    groups = [(found.part(group).variables, group.choices) for group in found.groups()]
    pairs = [pair for variables, choices in groups for pair in zip(variables, choices, strict=False)]
    chosen = [v.table.choice(i).names for v, i in pairs if isinstance(v, OpVariable)]
    assert ("near",) in chosen
    assert optimum(every_choice(part)).cost == pytest.approx(found.answer.cost, rel=CLOSE)
    without = search(part, forbid(part, "*", "near", {})).answer.cost
    assert without > found.answer.cost * (1 + CLOSE)


@pytest.mark.parametrize("mesh", ["2", pytest.param("2x2", marks=full)])
def test_borders_are_exchanged_where_that_is_best(mesh: str) -> None:
    """One large picture; that it is best is true on all choices."""
    part = build_problem(fold(small_subject("residuals").graph), ClusterRouter(parse_mesh(mesh), EAGER))
    found = search(part)
    groups = [(found.part(group).variables, group.choices) for group in found.groups()]
    pairs = [pair for variables, choices in groups for pair in zip(variables, choices, strict=False)]
    chosen = [v.table.choice(i).names for v, i in pairs if isinstance(v, OpVariable)]
    reaching = {"height", "width"}
    assert any(reaching & {*names} for names in chosen)
    assert optimum(every_choice(part)).cost == pytest.approx(found.answer.cost, rel=CLOSE)
    without = search(part, forbid(part, "*", "width", forbid(part, "*", "height", {}))).answer.cost
    assert without > found.answer.cost * (1 + CLOSE)


def some_rows(part: Problem, found: Solution | None, count: int, seed: int) -> dict[tuple[int, int], np.ndarray]:
    """A random subset of the choices of every variable, with those of a plan if one is given.

    Tensors that stand for the same thing in different copies get the same subset: they share ports.
    """
    random = np.random.default_rng(seed)
    kept: dict[tuple[int, int], set[int]] = {}
    if found is not None:
        for copy, own in zip(part.folded.copies, found.answer.choices, strict=True):
            for v, choice in enumerate(own):
                kept.setdefault((copy.block, v), set()).add(choice)
    alike: dict[object, list[tuple[int, int]]] = {}
    for b, block in enumerate(part.blocks):
        for v, variable in enumerate(block.variables):
            shared = isinstance(variable, TensorVariable) and v in block.exports
            kind = part.name_of(variable.tensor.name) if shared else (b, v)
            alike.setdefault(kind, []).append((b, v))
    rows = {}
    for members in alike.values():
        b, v = members[0]
        size = len(part.blocks[b].variables[v].seconds)
        chosen = set(random.permutation(size)[:count].tolist()).union(*(kept.get(m, ()) for m in members))
        rows |= dict.fromkeys(members, np.array(sorted(chosen)))
    return rows | pin_mode(part, KEEP)


@on_mesh("2x2x2", quick=lambda name, training: training == (name != "t5"))  # HiGHS takes longest for T5's training
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=full) for seed in range(1, 5))])
def test_integer_program_on_subsets_of_choices(case: tuple[str, bool, str], seed: int) -> None:
    """Three axes, where the search's answer has no part in the proof: both engines get the same random subsets."""
    part, best = problem(*case), solution(*case)
    around = part.network(some_rows(part, best, 16, seed))
    answer = solve(around)
    assert answer.cost == pytest.approx(best.answer.cost, rel=1e-9)
    assert answer.cost == pytest.approx(optimum(around).cost, rel=CLOSE)
    anywhere = part.network(some_rows(part, None, 14, seed))
    answer = solve(anywhere)
    assert best.answer.cost <= answer.cost * (1 + 1e-9)
    assert answer.cost == pytest.approx(optimum(anywhere).cost, rel=CLOSE)


# -- the sum -----------------------------------------------------------------------------------------


class Adder:
    """A plan's cost on the unfolded graph, from the layouts its operators ask for: no edge tables."""

    def __init__(self, found: Solution, whole: Graph) -> None:
        self.problem, self.graph = found.problem, whole
        self.folded = found.problem.folded
        self.choices = found.answer.choices
        self.home: dict[str, tuple[LayoutSpace, int]] = {}  # where readers find a tensor: its space and layout
        self.weights: set[tuple[int, str]] = set()  # copy, tensor: a weight or a view of one, in its own copy
        self.seen = 0
        self.total = 0.0

    def add(self) -> float:
        start = 0
        for number, copy in enumerate(self.folded.copies):
            stop = start + len(self.folded.blocks[copy.block].ops)
            self.copy(number, start)
            start = stop
        assert start == len(self.graph.ops)
        return self.total

    def copy(self, number: int, start: int) -> None:
        copy = self.folded.copies[number]
        part = self.problem.blocks[copy.block]
        chosen = dict(zip(range(len(part.variables)), self.choices[number], strict=True))
        leaving = set(part.outputs.values())
        self.spaces = {edge.tensor: edge.space for edge in part.edges if edge.target not in leaving}
        self.tensors = {
            v.tensor.name: (v.space, int(v.allowed[chosen[i]]))
            for i, v in enumerate(part.variables)
            if isinstance(v, TensorVariable) and i not in leaving
        }
        stored = {v.tensor.name: (v, chosen[i]) for i, v in enumerate(part.variables) if isinstance(v, WeightVariable)}
        for model, mine in zip(part.block.weights, copy.weights, strict=True):
            variable, choice = stored[model]
            self.total += float(variable.seconds[choice])
            self.weights.add((number, mine))
            self.publish(mine, model, variable.space, int(variable.stored[choice]))
        operators = {v.op.name: (v, chosen[i]) for i, v in enumerate(part.variables) if isinstance(v, OpVariable)}
        for i, model in enumerate(part.block.ops):
            self.operator(number, start + i, *operators[model.name])
            self.seen += 1
        for export, v in part.outputs.items():
            if (number, export) in self.folded.outputs:
                self.leave((number, export), part.variables[v], chosen[v])

    def leave(self, place: tuple[int, int], variable: Variable, choice: int) -> None:
        """An output goes to the layout it is handed out in."""
        assert isinstance(variable, TensorVariable)
        block = self.folded.blocks[self.folded.copies[place[0]].block]
        space, layout = self.tensors[block.exports[place[1]]]
        states = space.layout(layout)
        seen = states if self.folded.leaving[place].gradient else as_values(states)
        self.total += float(variable.space.seconds[variable.space.find(seen), int(variable.allowed[choice])])

    def publish(self, name: str, model: str, space: LayoutSpace | None, layout: int) -> None:
        """Readers find a tensor as it was made, or in the layout that was chosen for all of them."""
        if model in self.tensors:
            space, wanted = self.tensors[model]
            self.total += float(space.seconds[layout, wanted])
            layout = wanted
        if space is not None:
            self.home[name] = space, layout

    def operator(self, number: int, index: int, variable: OpVariable, choice: int) -> None:
        op, table = self.graph.ops[index], variable.table
        made = table.choice(choice)
        forward, backward = float(table.forward_seconds[choice]), float(table.backward_seconds[choice])
        self.total += forward + backward + float(table.kernel_seconds[choice])
        weights = {name: self.graph.tensors[name].nbytes for name in op.operands if (number, name) in self.weights}
        for position, name in enumerate(op.operands):
            if name not in self.home:
                leaf = self.graph.leaf_of[name]  # whoever reads an input or a constant slices it for free
                assert leaf.kind != "parameter"
                continue
            space, layout = self.home[name]
            wanted = space.find(made.operand(position))
            assert wanted >= 0
            seconds = float(space.seconds[layout, wanted])
            if name in weights:  # its gradient may travel during its share of the operator's backward pass
                ahead, share = float(space.forward_seconds[layout, wanted]), weights[name] / sum(weights.values())
                back = max(seconds - ahead - backward * share, 0.0) if space.priced else seconds - ahead
                stored = name in self.graph.leaf_of and variable.op.operands[position] not in self.tensors
                # and it may be gathered during its share of the forward pass
                rest = back + (max(ahead - forward * share, 0.0) if stored else ahead)
                ends = zip(space.layout(layout), space.layout(wanted), strict=True)
                exchanged = any(a.sharded and b.sharded and a != b for a, b in ends)
                seconds = seconds if exchanged else rest
            self.total += seconds
        if variable.rule.view and all((number, name) in self.weights for name in op.operands):
            self.weights.update((number, name) for name in op.results)
        for position, (name, model) in enumerate(zip(op.results, variable.op.results, strict=True)):
            space = self.tensors[model][0] if model in self.tensors else self.spaces.get(model)
            self.publish(name, model, space, space.find(made.result(position)) if space else -1)


def test_cost_is_the_sum_over_the_unfolded_graph(case: tuple[str, bool, str]) -> None:
    found, whole = solution(*case), graph(*case[:2])
    adder = Adder(found, whole)
    assert adder.add() == pytest.approx(found.answer.cost, rel=1e-9)
    assert adder.seen == len(whole.ops)
    seconds = found.seconds()
    waited = sum(value for kind, value in seconds.items() if kind != "hidden")
    assert waited == pytest.approx(found.answer.cost, rel=1e-9)


@on_mesh("2x4")
def test_tables_unfold_to_the_same_cost(case: tuple[str, bool, str]) -> None:
    found = solution(*case)
    flat = [choice for own in found.answer.choices for choice in own]
    assert evaluate(unfold(every_choice(found.problem)), flat) == pytest.approx(found.answer.cost, rel=1e-9)


def any_plan(part: Problem, seed: int) -> Solution:
    """Each variable of each copy at random."""
    random = np.random.default_rng(seed)
    network = every_choice(part)
    choices = tuple(
        tuple(int(random.integers(size)) for size in network.blocks[copy.block].sizes[: network.blocks[copy.block].own])
        for copy in network.copies
    )
    return Solution(part, SearchAnswer(choices, cost_of(network, choices), 0.0, False))


@on_mesh("2x4")
def test_any_plan_adds_up(case: tuple[str, bool, str]) -> None:
    """Not only optimal plans, where most edges cost nothing."""
    for seed in range(3):
        found = any_plan(problem(*case), seed)
        assert Adder(found, graph(*case[:2])).add() == pytest.approx(found.answer.cost, rel=1e-9)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Headless(nn.Module):
    """Layers and nothing after them: the last copy's result is the model's output, the others' are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("mesh", ["8", "2x4"])
def test_any_plan_adds_up_where_only_the_last_copy_leaves(mesh: str) -> None:
    with torch.device("meta"):
        whole = capture(Headless(), (torch.empty(64, 512),), training=False)
    folded = fold(whole)
    assert len(folded.copies_of(folded.copies[-1].block)) == 1  # what leaves is told apart
    part = build_problem(folded, ClusterRouter(parse_mesh(mesh), CLUSTER))
    for found in (search(part), *(any_plan(part, seed) for seed in range(3))):
        assert Adder(found, written_out(whole)).add() == pytest.approx(found.answer.cost, rel=1e-9)


# -- one process, many plans -------------------------------------------------------------------------


def test_plans_do_not_disturb_each_other() -> None:
    def planned(name: str, mesh: str) -> str:
        return plan_graph(graph(name, True), Request.of(mesh, memory=None)).to_json()

    first = planned("bert", "8")
    others = [planned("gpt2", "2x4"), planned("bert", "2x4"), planned("vit", "8")]
    assert planned("bert", "8") == first
    assert [planned("gpt2", "2x4"), planned("bert", "2x4"), planned("vit", "8")] == others
