"""Assignments from the search's numbers, at other sizes, and back to numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tapas.errors import PlanError
from tapas.ir.fold import Folded
from tapas.ir.graph import Graph
from tapas.plan.assignment import (
    Assignment,
    BlockDecision,
    OperatorDecision,
    OutputDecision,
    TensorDecision,
)
from tapas.plan.fingerprint import Structure, difference, structure_of, tensor_references
from tapas.plan.plan import Plan
from tapas.planner.solution import Group, Solution, layout_of
from tapas.problem.calls import Calls
from tapas.problem.problem import Edge, ModeVariable, OpVariable, Problem, Rows, TensorVariable, WeightVariable
from tapas.rules.choices import Choice, Option, legal
from tapas.search import Choices
from tapas.sharding.layout import Layout, State
from tapas.sharding.route import Hop, Route, check_layout, check_route


class ForeignPlan(PlanError):
    """A plan that was made for another model."""


# -- from the search's numbers ---------------------------------------------------------------------


def assignment_of(solution: Solution) -> Assignment:
    """What a search has decided, in words that hold without its tables."""
    folded = solution.problem.folded
    copies = [0] * len(folded.copies)
    decisions: dict[BlockDecision, int] = {}
    for group in solution.groups():
        number = decisions.setdefault(_Reader(solution, group).decision(), len(decisions))
        for copy in group.copies:
            copies[copy] = number
    mesh = tuple(solution.problem.router.mesh.sizes)
    return Assignment(mesh, structure_of(folded), tuple(decisions), tuple(copies))


class _Reader:
    """One group of copies, read back."""

    def __init__(self, solution: Solution, group: Group) -> None:
        self.part, self.choices, self.mode = solution.part(group), group.choices, solution.mode(group)
        self.into = {(edge.target, edge.operand): edge for edge in self.part.edges}
        self.references = tensor_references(self.part.block)
        self.own, self.block = len(self.part.variables), group.block
        folded = solution.problem.folded
        self.loss = (folded.copies[folded.loss[0]].block, folded.loss[1]) if folded.loss else None

    def route(self, edge: Edge | None) -> Route:
        if edge is None:
            return ()
        source = int(edge.source_layouts[self.choices[edge.source]])
        target = int(edge.target_layouts[self.choices[edge.target]])
        return tuple(Hop(move.axes, move.old, move.new) for move in edge.space.route(source, target))

    def port(self, number: int) -> Layout:
        edge = next(edge for edge in self.part.edges if edge.source == self.own + number)
        return edge.space.layout(int(edge.source_layouts[self.choices[edge.source]]))

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
                    outputs.append(OutputDecision(leaving[v], (self.block, leaving[v]) == self.loss, layout, route))
                case TensorVariable():
                    edge = self.into[v, -1]
                    reference = self.references[edge.tensor]
                    tensors.append(TensorDecision(reference, layout_of(variable, choice), self.route(edge)))
                case ModeVariable():
                    pass
        ports = tuple(self.port(number) for number in range(len(self.part.port_sizes)))
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
    structure = structure_of(folded)
    if fact := difference(assignment.structure, structure):
        raise ForeignPlan("plan", f"was made for another model: {fact}", "make it again for this model")
    return _Adapting(assignment, structure, folded).adapted()


class _Adapting:
    def __init__(self, assignment: Assignment, structure: Structure, folded: Folded) -> None:
        self.assignment, self.structure, self.folded = assignment, structure, folded
        self.calls = Calls(folded)
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
        return Assignment(self.assignment.mesh, self.structure, tuple(numbers), tuple(copies))

    def exported(self, decision: BlockDecision, copy: int, export: int) -> Layout:
        """How a copy leaves a tensor that others read."""
        reference = self.structure.blocks[self.structure.copies[copy].structure].exports[export]
        return next(tensor.layout for tensor in decision.tensors if tensor.tensor == reference)


class _AdaptedBlock:
    """One decision on one block of another graph."""

    def __init__(self, home: _Adapting, planned: BlockDecision, number: int, ports: tuple[Layout, ...]) -> None:
        self.block, self.tensors, self.mesh = home.folded.blocks[number], home.folded.tensors, home.assignment.mesh
        self.planned, self.ports = planned, ports
        first = home.calls.first[number]
        self.options = home.options[first : first + len(self.block.ops)]
        self.states: dict[tuple[str, State], State] = {}  # a tensor's planned state -> its state here
        self.references = {reference: name for name, reference in tensor_references(self.block).items()}

    def decision(self) -> BlockDecision:
        chosen = [self.chosen(i, planned) for i, planned in enumerate(self.planned.operators)]
        weights = self.planned.weights
        for name, layout in zip(self.block.weights, weights, strict=True):
            self.check(name, layout)
        where = dict(zip((*self.block.weights, *self.block.ports), (*weights, *self.ports), strict=True))
        for op, choice in zip(self.block.ops, chosen, strict=True):
            where |= {name: choice.result(i) for i, name in enumerate(op.results)}
        tensors = []
        for planned in self.planned.tensors:
            name = self.references[planned.tensor]
            layout = tuple(self.state(name, state) for state in planned.layout)
            route = self.route(name, where[name], planned.route, layout)
            tensors.append(TensorDecision(planned.tensor, layout, route))
        where |= {self.references[tensor.tensor]: tensor.layout for tensor in tensors}
        operators = [self.operator(i, choice, where) for i, choice in enumerate(chosen)]
        outputs = [self.output(planned, where) for planned in self.planned.outputs]
        return replace(
            self.planned, ports=self.ports, operators=tuple(operators), tensors=tuple(tensors), outputs=tuple(outputs)
        )

    def chosen(self, number: int, planned: OperatorDecision) -> Choice:
        """What was planned for an operator, among its options here; at another size tilings differ."""
        op, options = self.block.ops[number], self.options[number]
        for words in (str, _without_tiling):
            named: dict[str, Option] = {}
            for option in options:
                named.setdefault(words(option), option)
            wanted = [words(text) for text in planned.choice]
            if all(text in named for text in wanted):
                choice = Choice(tuple(named[text] for text in wanted))
                if legal(choice.options, self.mesh):
                    self.note(op.operands, planned.operands, [choice.operand(i) for i in range(len(op.operands))])
                    self.note(op.results, planned.results, [choice.result(i) for i in range(len(op.results))])
                    return choice
        raise _impossible(op.module or op.name, ", ".join(planned.choice), f"{op.target} cannot do that")

    def note(self, names: Sequence[str], planned: Sequence[Layout], found: Sequence[Layout]) -> None:
        for name, before, after in zip(names, planned, found, strict=True):
            self.states.update(((name, old), new) for old, new in zip(before, after, strict=True))

    def state(self, name: str, planned: State) -> State:
        return self.states.get((name, planned), planned)

    def check(self, name: str, layout: Layout) -> None:
        if wrong := check_layout(self.tensors[name].shape, layout, self.mesh):
            raise _impossible(name, ", ".join(map(str, layout)), wrong)

    def route(self, name: str, start: Layout, planned: Route, end: Layout) -> Route:
        """The same steps from where the tensor is here."""
        found: list[Hop] = []
        layout = start
        for hop in planned:
            found.append(Hop(hop.axes, layout[hop.axes[0]], self.state(name, hop.new)))
            layout = found[-1].after(layout)
        if wrong := check_route(self.tensors[name].shape, start, found, end, self.mesh):
            raise _impossible(name, ", ".join(map(str, end)), wrong)
        return tuple(found)

    def operator(self, number: int, choice: Choice, where: Mapping[str, Layout]) -> OperatorDecision:
        op, planned = self.block.ops[number], self.planned.operators[number]
        routes: list[Route] = []
        for i, name in enumerate(op.operands):
            found = name in where  # or it is an input, buffer or constant: whoever reads it takes what it needs
            routes.append(self.route(name, where[name], planned.routes[i], choice.operand(i)) if found else ())
        operands, results = range(len(op.operands)), range(len(op.results))
        return OperatorDecision(
            tuple(map(str, choice.options)), tuple(map(choice.operand, operands)), tuple(map(choice.result, results)),
            tuple(routes),
        )  # fmt: skip

    def output(self, planned: OutputDecision, where: Mapping[str, Layout]) -> OutputDecision:
        name = self.block.exports[planned.export]
        layout = tuple(self.state(name, state) for state in planned.layout)
        start = where[name] if planned.loss else tuple(state.value for state in where[name])
        return replace(planned, layout=layout, route=self.route(name, start, planned.route, layout))


def _without_tiling(part: object) -> str:
    return str(part).split("|")[0]


def _impossible(place: str, planned: str, why: str) -> PlanError:
    return PlanError(place, f"cannot be split as planned ({planned}) at this size: {why}", "plan again for it")


def followed(plan: Plan, graph: Graph, folded: Folded) -> Assignment:
    """A plan's decisions on a model: nothing is searched for."""
    if plan.training != graph.training:
        planned, found = (("training" if trains else "inference") for trains in (plan.training, graph.training))
        raise PlanError("plan", f"was made for {planned}, this is {found}", "plan again, or give what it was made for")
    return adapted(plan.assignment, folded)


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
