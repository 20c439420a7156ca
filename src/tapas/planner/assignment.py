"""Assignments from the search's numbers, at other sizes, and back to numbers."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np

from tapas.errors import PlanError
from tapas.ir.fold import Folded
from tapas.ir.graph import Graph, Op, as_read
from tapas.plan.assignment import (
    Assignment,
    BlockDecision,
    OperatorDecision,
    OutputDecision,
    TensorDecision,
)
from tapas.plan.fingerprint import GraphStructure, difference, main_dtype, structure_of, tensor_references
from tapas.plan.plan import Plan
from tapas.planner.solution import Group, Solution, layout_of
from tapas.problem.graph_rules import GraphRules
from tapas.problem.problem import Edge, ModeVariable, OpVariable, Problem, Rows, TensorVariable, WeightVariable
from tapas.rules.choices import Choice, OperatorChoices
from tapas.search import Choices
from tapas.sharding.layout import Layout, as_values
from tapas.sharding.route import Hop, Route, check_layout, check_route


class ForeignPlan(PlanError):
    """A plan that was made for another model."""


# -- from the search's numbers ---------------------------------------------------------------------


def assignment_of(solution: Solution, pieces: int = 1) -> Assignment:
    """What a search has decided, in words that hold without its tables."""
    folded = solution.problem.folded
    copies = [0] * len(folded.copies)
    decisions: dict[BlockDecision, int] = {}
    for group in solution.groups():
        number = decisions.setdefault(_Reader(solution, group).decision(), len(decisions))
        for copy in group.copies:
            copies[copy] = number
    mesh = tuple(solution.problem.router.mesh.sizes)
    found = tuple((key, factors) for key, factors in sorted(folded.found.items()) if factors)
    return Assignment(mesh, structure_of(folded), tuple(decisions), tuple(copies), pieces, found)


class _Reader:
    """One group of copies, read back."""

    def __init__(self, solution: Solution, group: Group) -> None:
        self.part, self.choices, self.mode = solution.part(group), group.choices, solution.mode(group)
        self.into = {(edge.target, edge.operand): edge for edge in self.part.edges}
        self.references = tensor_references(self.part.block)
        self.own, self.block = len(self.part.variables), group.block
        folded = solution.problem.folded
        self.leaving = {(folded.copies[c].block, e): what for (c, e), what in folded.leaving.items()}

    def route(self, edge: Edge | None) -> Route:
        if edge is None:
            return ()
        source = int(edge.source_layouts[self.choices[edge.source]])
        target = int(edge.target_layouts[self.choices[edge.target]])
        return tuple(step.hop for step in edge.space.route(source, target))

    def port(self, number: int) -> Layout:
        return self.part.ports[number].layout(self.choices[self.own + number])

    def decision(self) -> BlockDecision:
        weights: list[Layout] = []
        operators: list[OperatorDecision] = []
        tensors: list[TensorDecision] = []
        outputs: list[OutputDecision] = []
        leaving = {variable: export for export, variable in self.part.outputs.items()}
        for v, (variable, choice) in enumerate(zip(self.part.variables, self.choices, strict=False)):
            match variable:
                case WeightVariable():
                    weights.append(layout_of(variable, choice))
                case OpVariable():
                    operators.append(self.operator(v, variable, variable.table.choice(choice)))
                case TensorVariable() if v in leaving:
                    layout, route = layout_of(variable, choice), self.route(self.into[v, -1])
                    wanted = self.leaving[self.block, leaving[v]]
                    outputs.append(OutputDecision(leaving[v], wanted.gradient, wanted.priced, layout, route))
                case TensorVariable():
                    edge = self.into[v, -1]
                    reference = self.references[edge.tensor]
                    tensors.append(TensorDecision(reference, layout_of(variable, choice), self.route(edge)))
                case ModeVariable():
                    pass
        ports = tuple(self.port(number) for number in range(len(self.part.ports)))
        return BlockDecision(self.mode, tuple(weights), ports, tuple(operators), tuple(tensors), tuple(outputs))

    def operator(self, v: int, variable: OpVariable, choice: Choice) -> OperatorDecision:
        operands, results = range(len(variable.op.operands)), range(len(variable.op.results))
        return OperatorDecision(
            tuple(map(str, choice.options)), tuple(map(choice.operand, operands)), tuple(map(choice.result, results)),
            tuple(self.route(self.into.get((v, i))) for i in operands),
        )  # fmt: skip


# -- on a graph --------------------------------------------------------------------------------------


def adapted(assignment: Assignment, folded: Folded) -> Assignment:
    """The same decisions on a folded graph of the same structure, which may have other sizes: where a decision is not
    legal there, that is an error that says why. On the graph it was made for, an assignment stays what it is."""
    structure, folded = structure_of(folded), replace(folded, found=dict(assignment.found))
    if fact := difference(assignment.structure, structure):
        raise ForeignPlan("plan", f"was made for another model: {fact}", "make it again for this model")
    return _Adapting(assignment, structure, folded).adapted()


class _Adapting:
    def __init__(self, assignment: Assignment, structure: GraphStructure, folded: Folded) -> None:
        self.assignment, self.structure, self.folded = assignment, structure, folded
        self.calls = GraphRules(folded)
        self.options = self.calls.options(assignment.mesh)

    def adapted(self) -> Assignment:
        numbers: dict[BlockDecision, int] = {}
        known: dict[tuple, BlockDecision] = {}
        by_copy: list[BlockDecision] = []
        for number, copy in enumerate(self.folded.copies):
            ports = tuple(self.exported(by_copy[source], source, export) for source, export in copy.ports)
            key = self.assignment.copies[number], copy.block, ports
            if key not in known:
                known[key] = _AdaptedBlock(self, self.assignment.decision(number), copy.block, ports).decision()
            by_copy.append(known[key])
        copies = [numbers.setdefault(decision, len(numbers)) for decision in by_copy]
        return replace(self.assignment, structure=self.structure, decisions=tuple(numbers), copies=tuple(copies))

    def exported(self, decision: BlockDecision, copy: int, export: int) -> Layout:
        """How a copy leaves a tensor that others read."""
        reference = self.structure.blocks[self.structure.copies[copy].structure].exports[export]
        return next(tensor.layout for tensor in decision.tensors if tensor.tensor == reference)


class _AdaptedBlock:
    """One decision on one block of another graph, operator by operator."""

    def __init__(self, home: _Adapting, planned: BlockDecision, number: int, ports: tuple[Layout, ...]) -> None:
        self.block, self.tensors, self.mesh = home.folded.blocks[number], home.folded.tensors, home.assignment.mesh
        self.planned, self.ports = planned, ports
        first = home.calls.first[number]
        self.options = home.options[first : first + len(self.block.ops)]
        references = tensor_references(self.block)
        published = {tensor.tensor: tensor for tensor in planned.tensors}
        self.published = {name: published[ref] for name, ref in references.items() if ref in published}
        self.where: dict[str, Layout] = {}  # how readers find tensors
        self.moved: dict[str, TensorDecision] = {}

    def decision(self) -> BlockDecision:
        for name, layout in zip(
            (*self.block.weights, *self.block.ports), (*self.planned.weights, *self.ports), strict=True
        ):
            self.check(name, layout)
            self.publish(name, layout)
        operators = [self.operator(i, planned) for i, planned in enumerate(self.planned.operators)]
        tensors = tuple(self.moved[name] for name in self.published)
        outputs = tuple(map(self.output, self.planned.outputs))
        return replace(self.planned, ports=self.ports, operators=tuple(operators), tensors=tensors, outputs=outputs)

    def check(self, name: str, layout: Layout) -> None:
        if wrong := check_layout(self.tensors[name].shape, layout, self.mesh):
            raise _impossible(name, ", ".join(map(str, layout)), wrong)

    def publish(self, name: str, start: Layout) -> None:
        self.where[name], planned = start, self.published.get(name)
        if planned is not None:
            end, route = self.moved_to(name, start, planned.route, planned.layout)
            self.moved[name], self.where[name] = TensorDecision(planned.tensor, end, route), end

    def moved_to(self, name: str, start: Layout, planned: Route, wanted: Layout) -> tuple[Layout, Route]:
        """The same steps from where a tensor is to what was planned; axes that are not touched stay as they are."""
        touched = {axis for hop in planned for axis in hop.axes}
        end = tuple(state if axis in touched else start[axis] for axis, state in enumerate(wanted))
        return end, self.route(name, start, planned, end)

    def route(self, name: str, start: Layout, planned: Route, end: Layout) -> Route:
        """The same steps; where the last one along an axis leads is told by the end."""
        found: list[Hop] = []
        layout = start
        for number, hop in enumerate(planned):
            last = not any(axis in later.axes for later in planned[number + 1 :] for axis in hop.axes)
            found.append(Hop(hop.axes, layout[hop.axes[0]], end[hop.axes[0]] if last else hop.new))
            layout = found[-1].after(layout)
        if wrong := check_route(self.tensors[name].shape, start, found, end, self.mesh):
            raise _impossible(name, ", ".join(map(str, end)), wrong)
        return tuple(found)

    def operator(self, number: int, planned: OperatorDecision) -> OperatorDecision:
        op, choice = self.block.ops[number], self.chosen(number, planned)
        routes: list[Route] = []
        for i, tensor in enumerate(as_read(op, self.tensors)):
            start = self.where.get(tensor.name)
            if start is None:  # an input, buffer or constant: whoever reads it takes what it needs
                routes.append(())
                continue
            start = start if tensor.differentiable else as_values(start)
            routes.append(self.route(tensor.name, start, planned.routes[i], choice.operand(i)))
        for i, name in enumerate(op.results):
            self.publish(name, choice.result(i))
        operands, results = range(len(op.operands)), range(len(op.results))
        return OperatorDecision(
            tuple(map(str, choice.options)), tuple(map(choice.operand, operands)), tuple(map(choice.result, results)),
            tuple(routes),
        )  # fmt: skip

    def chosen(self, number: int, planned: OperatorDecision) -> Choice:
        """What was planned for an operator, among its options here. At another size tilings differ: then as it fits
        what is already where it was planned to be, or else as much as planned as possible."""
        op = self.block.ops[number]
        waiting = [i for i, name in enumerate(op.operands) if name in self.where and not planned.routes[i]]

        def worth(choice: Choice) -> tuple[int, int]:
            fits = sum(choice.operand(i) == self.where[op.operands[i]] for i in waiting)
            return fits, sum(str(option) == text for option, text in zip(choice.options, planned.choice, strict=True))

        alike = [[o for o in self.options[number] if _without_tiling(o) == _without_tiling(t)] for t in planned.choice]
        known = OperatorChoices(self.options[number])
        choices = [Choice(options) for options in product(*alike) if known.execute(options, self.mesh)]
        choices = [choice for choice in choices if self.possible(op, choice)]
        if not choices:
            raise _impossible(op.module or op.name, ", ".join(planned.choice), f"{op.target} cannot do that")
        return max(choices, key=worth)

    def possible(self, op: Op, choice: Choice) -> bool:
        """Whether all tensors around an operator can have the layouts that come with a choice."""
        layouts = [choice.operand(i) for i in range(len(op.operands))] + [
            choice.result(i) for i in range(len(op.results))
        ]
        shapes = [self.tensors[name].shape for name in (*op.operands, *op.results)]
        return not any(check_layout(shape, at, self.mesh) for shape, at in zip(shapes, layouts, strict=True))

    def output(self, planned: OutputDecision) -> OutputDecision:
        name = self.block.exports[planned.export]
        start = self.where[name] if planned.gradient else as_values(self.where[name])
        end, route = self.moved_to(name, start, planned.route, planned.layout)
        return replace(planned, layout=end, route=route)


def _without_tiling(part: object) -> str:
    return str(part).split("|")[0]


def _impossible(place: str, planned: str, why: str) -> PlanError:
    return PlanError(place, f"cannot be split as planned ({planned}) at this size: {why}", "plan again for it")


def followed(plan: Plan, graph: Graph, folded: Folded) -> Assignment:
    """A plan's decisions on a model: nothing is searched for."""
    if plan.training != graph.training:
        planned, found = (("training" if trains else "inference") for trains in (plan.training, graph.training))
        raise PlanError("plan", f"was made for {planned}, this is {found}", "plan again, or give what it was made for")
    try:
        return adapted(plan.assignment, folded)
    except ForeignPlan as error:
        if (dtype := main_dtype(folded)) == plan.dtype:
            raise
        fact = f"{error.fact} (it was made in {plan.dtype}, the model is in {dtype}, which casts at other places)"
        raise ForeignPlan(error.place, fact, "plan again in the precision of this model") from None


# -- back to numbers -----------------------------------------------------------------------------------


def choices_of(problem: Problem, assignment: Assignment) -> Choices | None:
    """The choices of a problem that an assignment of its graph stands for; None if one of them is not among them."""
    known: dict[tuple[int, int], tuple[int, ...] | None] = {}
    found: list[tuple[int, ...]] = []
    for number, copy in enumerate(problem.folded.copies):
        key = assignment.copies[number], copy.block
        if key not in known:
            known[key] = _numbers(problem, copy.block, assignment.decision(number))
        own = known[key]
        if own is None:
            return None
        found.append(own)
    return tuple(found)


def stored_rows(problem: Problem, stored: Mapping[str, Layout]) -> Rows:
    """What is left of a problem whose weights are stored already, by path."""
    folded = problem.folded
    rows: dict[tuple[int, int], np.ndarray] = {}
    for copy in folded.copies:
        variables = problem.blocks[copy.block].variables
        weights = [(v, variable) for v, variable in enumerate(variables) if isinstance(variable, WeightVariable)]
        for (v, variable), name in zip(weights, copy.weights, strict=True):
            path = folded.leaf_of[name].paths[0]
            row = np.flatnonzero(variable.stored == variable.space.find(stored[path]))
            if not len(row) or not np.array_equal(rows.setdefault((copy.block, v), row), row):
                raise PlanError(path, "is stored in a way that these inputs cannot use", "plan again for these inputs")
    return rows


def _numbers(problem: Problem, block: int, decision: BlockDecision) -> tuple[int, ...] | None:
    part = problem.blocks[block]
    weights, operators, tensors = iter(decision.weights), iter(decision.operators), iter(decision.tensors)
    leaving = {variable: export for export, variable in part.outputs.items()}
    outputs = {output.export: output.layout for output in decision.outputs}
    found: list[int] = []
    for v, variable in enumerate(part.variables):
        match variable:
            case ModeVariable():
                row = np.flatnonzero([mode == decision.recompute for mode in variable.modes])
            case WeightVariable():
                row = np.flatnonzero(variable.stored == variable.space.find(next(weights)))
            case TensorVariable():
                layout = outputs[leaving[v]] if v in leaving else next(tensors).layout
                row = np.flatnonzero(variable.allowed == variable.space.find(layout))
            case OpVariable():
                row = _operator_row(variable, next(operators))
        if not len(row):
            return None
        found.append(int(row[0]))
    return tuple(found)


def _operator_row(variable: OpVariable, decision: OperatorDecision) -> np.ndarray:
    texts = [str(option) for option in variable.table.options]
    fits = np.array([[text == wanted for wanted in decision.choice] for text in texts])
    return np.flatnonzero(fits[variable.table.combos, np.arange(len(decision.choice))].all(1))
