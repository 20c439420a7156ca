"""What a format can say, as a test on every choice of an operator and on every move between two of them.

The same tests serve both ways: what a plan does that fails one is a reason to refuse it, and a problem that is left
only with what passes has the best plan that the format can say as its optimum.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from torch import nn

from tapas.errors import PlanError
from tapas.export.exported import Reason, starred
from tapas.export.routers import find_routers
from tapas.export.sites import BY_EXPERT, NONE, OTHER, STREAM, WEIGHT, ModuleSplit, Sites, split_of_module
from tapas.ir.patterns import inside
from tapas.planner.solution import Group, Solution
from tapas.problem.pins import role_of
from tapas.problem.problem import BlockProblem, Edge, OpVariable, Problem, Rows, WeightVariable
from tapas.rules import wording
from tapas.rules.base import KEEP
from tapas.rules.choices import Option
from tapas.sharding.layout import State, local_shape

BATCH, SEQUENCE = "batch", "sequence"


@dataclass(frozen=True, slots=True)
class AxisUse:
    """What the axes of a mesh are for: one splits layers inside, one the batch. -1: no axis does."""

    tensor: int = -1
    data: int = -1


class Vocabulary:
    """The words of one format: which modules it splits, and what it does to what enters and leaves them."""

    name = ""
    splits: ClassVar[Mapping[str, frozenset[str]]] = {}
    sequence = False  # whether anything but the batch may be split between modules

    def enters(self, kind: str, found: State, used: State, last: int) -> bool:
        """Whether a module takes its input in one state and goes on in another."""
        return found == used

    def shares(self, module: nn.Module | None) -> bool:
        """Whether a module may read whole weights of its own while it sees a part of its input only: the gradients of
        such weights have to be added up."""
        return False

    def leaves(self, kind: str, made: State, left: State, last: int) -> bool:
        """Whether a module that makes its result in one state hands it on in another."""
        return made == left and made.kind == "R"


@dataclass(frozen=True)
class PermittedEdge(Edge):
    """An edge on which only some moves are possible."""

    permitted: np.ndarray = field(default_factory=lambda: np.ones((0, 0), bool))  # [layout before, after]

    def costs(self, source: np.ndarray | None = None, target: np.ndarray | None = None) -> np.ndarray:
        return np.where(self._mask(source, target), super().costs(source, target), np.inf)

    def _mask(self, source: np.ndarray | None, target: np.ndarray | None) -> np.ndarray:
        before, after = self._layouts(source, target)
        return self.permitted[before[:, None], after]


class Grammar:
    """A vocabulary on one problem."""

    def __init__(
        self, problem: Problem, modules: Mapping[str, nn.Module], vocabulary: Vocabulary, use: AxisUse,
        whole: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.problem, self.words, self.use = problem, vocabulary, use
        self.whole = whole  # modules, with * for numbers, whose code is known not to work on parts
        self.sites = Sites(problem.folded, modules)
        self.mesh = problem.router.mesh

    # -- choices ---------------------------------------------------------------------------------------

    def choice_fact(self, variable: OpVariable, option: Option, axis: int) -> str:
        """Why an operator cannot do this along an axis; "" if it can."""
        if self.mesh.sizes[axis] == 1:
            return ""
        role = role_of(self.problem, variable)
        if axis == self.use.data:
            able = any(role(o) == BATCH for o in variable.table.options)
            ok = role(option) == BATCH if able else option.factor is None
            return "" if ok else f"{self._does(variable, option)} over {self._axis(axis)}, where others split the batch"
        if axis != self.use.tensor:
            return "" if option.factor is None else f"{self.words.name} has no use for the axis {self._axis(axis)}"
        kind = self.sites.kind(variable.op)
        if kind:
            split = split_of_module(kind, option, self.mesh.sizes[axis])
            known = split != NONE and split in self.words.splits.get(kind, ())
            if not known:
                return f"{self._does(variable, option)}, for which there is no style"
            return self._dealing_fact(variable, option, axis) if split == BY_EXPERT else ""
        return self._other_fact(variable, option, role(option))

    def _dealing_fact(self, variable: OpVariable, option: Option, axis: int) -> str:
        """Why experts cannot be dealt out to devices; "" if they can."""
        experts = variable.call.operands[WEIGHT[self.sites.kind(variable.op)]].shape[0]
        if experts % self.mesh.sizes[axis]:
            return f"{self._does(variable, option)}, and {experts} experts do not divide by {self.mesh.sizes[axis]}"
        if variable.op.module not in self.routers:
            return f"{self._does(variable, option)}, and no router is found whose choice can be told the devices"
        return ""

    @cached_property
    def routers(self) -> dict[str, str]:
        """Modules of experts -> the modules that choose among them, in the first copy of each block."""
        return find_routers(self.problem.folded, self.sites)

    def _other_fact(self, variable: OpVariable, option: Option, role: str) -> str:
        """Of an operator between modules, which runs as the model's own code on what each device holds."""
        if option.factor is None:
            return "" if option.name in ("R", "B") else "partial sums pass through it, and are added up later"
        does, module = self._does(variable, option), self.sites.modules.get(variable.op.module)
        if starred(variable.op.module) in self.whole:
            return f"{does}, and its code does not work on a part of them"
        if role == BATCH or (role == SEQUENCE and not self.words.sequence):
            return f"{does} between layers"
        if option.factor.kernel is not None:
            return f"{does} with an implementation of TAPAS's own"
        for name, tensor, state in zip(variable.op.operands, variable.call.operands, option.operands, strict=True):
            leaf = self.problem.folded.leaf_of.get(name)
            if leaf is not None and state.sharded:
                what = f"a part of its weight {leaf.paths[0]}" if leaf.kind == "parameter" else "a part of a constant"
                return f"reads {what}, which no style cuts"
            if leaf is not None and state.kind == "B" and not self.words.shares(module):
                return f"{does} and reads the weight {leaf.paths[0]}, whose gradient nothing would add up"
            if leaf is None and tensor.differentiable and state.kind == "B":
                return f"{does} and reads a whole tensor, whose gradient nothing would add up"
        return ""

    def _does(self, variable: OpVariable, option: Option) -> str:
        if option.factor is None:
            return "is whole" if option.name in ("R", "B") else "passes partial sums on"
        target, role = variable.op.target, role_of(self.problem, variable)(option)
        words = wording(target)
        return f"{words.name or target.split('.')[1]} splits {role or words.factors.get(option.name, option.name)}"

    def _axis(self, axis: int) -> str:
        return self.mesh.names[axis]

    # -- moves ---------------------------------------------------------------------------------------------

    def move_fact(self, part: BlockProblem, edge: Edge, before: State, after: State, axis: int) -> str:
        """Why a tensor cannot change its state along an axis like this; "" if it can."""
        found, used = before.value, after.value
        if self.mesh.sizes[axis] == 1:
            return ""
        own = len(part.variables)
        source = part.variables[edge.source] if edge.source < own else None
        target = part.variables[edge.target]
        if self.sites.is_parameter(edge.tensor):
            return self._weight_fact(edge, found, used, axis, (isinstance(target, OpVariable) and target) or None)
        leaving = edge.target in part.outputs.values()
        if axis == self.use.data:
            same = found == used or leaving or not edge.space.shape
            return "" if same else f"{self._moves(found, used)} over {self._axis(axis)}"
        last = len(edge.space.shape) - 1
        kind = self.sites.kind(source.op) if isinstance(source, OpVariable) else OTHER
        if kind and axis == self.use.tensor:
            fine = self.words.leaves(kind, found, used, last)
        else:
            into = self.sites.kind(target.op) if isinstance(target, OpVariable) else OTHER
            stream = bool(into) and edge.operand == STREAM[into] and axis == self.use.tensor
            fine = found == used or (stream and self.words.enters(into, found, used, last))
        if fine and leaving and used.kind != "R":
            return "is returned as a part on each device"
        return "" if fine else f"{self._moves(found, used)} where no style of a module does so"

    def _weight_fact(self, edge: Edge, found: State, used: State, axis: int, target: OpVariable | None) -> str:
        if found == used:
            return ""
        if axis == self.use.data and used.kind == "R":
            held = self.sites.is_buffer(edge.tensor)
            return "is stored in pieces, and is a buffer, which stays whole" if held else ""
        if target is not None and edge.operand == 2 and self.sites.kind(target.op) and found.kind == "R":
            return ""  # the bias of a product that is summed up: it is added once
        return f"{self._moves(found, used)} for every use, over {self._axis(axis)}, which splits layers inside"

    def _moves(self, found: State, used: State) -> str:
        does = {"SR": "is gathered", "SS": "is exchanged", "PR": "is summed up", "PS": "is summed up and scattered"}
        return does.get(found.kind + used.kind, "is cut" if used.kind == "S" else "is kept as partial sums")

    # -- both of a plan --------------------------------------------------------------------------------

    def reasons(self, solution: Solution) -> Iterator[Reason]:
        """All that a plan does and the format has no word for."""
        for group in solution.groups():
            part = solution.part(group)
            for variable, choice in zip(part.variables, group.choices, strict=False):
                if isinstance(variable, OpVariable):
                    for axis, option in enumerate(variable.table.choice(choice).options):
                        if fact := self.choice_fact(variable, option, axis):
                            yield from self._everywhere(group, variable.op.module or variable.op.name, fact)
            for edge in part.edges:
                before, after = _ends(edge, group)
                for axis, (a, b) in enumerate(zip(before, after, strict=True)):
                    if fact := self.move_fact(part, edge, a, b, axis):
                        yield from self._everywhere(group, self._place(part, edge), fact)
            if solution.mode(group) != KEEP:
                fact = f"computes again in the backward pass (recompute={solution.mode(group)})"
                yield from self._everywhere(group, part.block.name, fact)

    def _place(self, part: BlockProblem, edge: Edge) -> str:
        if self.sites.is_parameter(edge.tensor):
            return self.problem.folded.leaf_of[edge.tensor].paths[0]
        source = part.variables[edge.source] if edge.source < len(part.variables) else None
        if isinstance(source, OpVariable):
            return source.op.module or source.op.name
        maker = next((e for e in part.edges if e.target == edge.source), None)
        return self._place(part, maker) if maker is not None else edge.tensor.partition(":")[0]

    def _everywhere(self, group: Group, place: str, fact: str) -> Iterator[Reason]:
        copies = self.problem.folded.copies
        first = copies[self.problem.folded.copies_of(group.block)[0]].path
        for copy in group.copies:
            yield Reason(inside(place, first, copies[copy].path) if first else place, fact)

    def restricted(self) -> tuple[Problem, Rows]:
        """The problem with nothing but what can be said."""
        rows: dict[tuple[int, int], np.ndarray] = {}
        blocks = []
        for b, part in enumerate(self.problem.blocks):
            for v, variable in enumerate(part.variables):
                if isinstance(variable, OpVariable):
                    rows[b, v] = self._choices(variable)
                elif isinstance(variable, WeightVariable) and self.use.data >= 0:
                    rows[b, v] = self._stored(variable)
            blocks.append(replace(part, edges=tuple(self._permitted(part, edge) for edge in part.edges)))
        return replace(self.problem, blocks=tuple(blocks)), rows

    def _choices(self, variable: OpVariable) -> np.ndarray:
        table = variable.table
        axes = range(len(self.mesh.sizes))
        fine = np.array([[not self.choice_fact(variable, option, axis) for axis in axes] for option in table.options])
        left = np.flatnonzero(fine[table.combos, np.arange(table.combos.shape[1])].all(1))
        if not len(left):
            raise PlanError(variable.op.module or variable.op.name, f"cannot be said to {self.words.name} at all")
        return left

    def _stored(self, variable: WeightVariable) -> np.ndarray:
        """In pieces on the axis of the batch, wherever they can be; buffers stay whole."""
        states = variable.space.combos[variable.stored, self.use.data]
        if self.sites.is_buffer(variable.tensor.name):
            return np.flatnonzero(np.array([state.kind == "R" for state in variable.space.states])[states])
        split = np.array([state.sharded and not state.tiling for state in variable.space.states])[states]
        return np.flatnonzero(split) if split.any() else np.arange(len(variable.stored))

    def _permitted(self, part: BlockProblem, edge: Edge) -> PermittedEdge:
        states, combos = edge.space.states, edge.space.combos
        fine = np.ones((len(combos), len(combos)), bool)
        for axis in range(len(self.mesh.sizes)):
            each = np.array([[not self.move_fact(part, edge, a, b, axis) for b in states] for a in states])
            fine &= each[combos[:, axis][:, None], combos[:, axis]]
        values = {name: getattr(edge, name) for name in Edge.__dataclass_fields__}
        return PermittedEdge(**values, permitted=fine)

    # -- what is said ----------------------------------------------------------------------------------

    def splits(self, solution: Solution) -> Iterator[ModuleSplit]:
        """Every module that is not whole, in every copy."""
        for group in solution.groups():
            part = solution.part(group)
            for v, variable in enumerate(part.variables):
                if isinstance(variable, OpVariable) and self.use.tensor >= 0:
                    said = self._split(part, group, v, variable)
                    if said is not None:
                        for reason in self._everywhere(group, said.path, ""):
                            yield replace(said, path=reason.place)

    def local_shapes(self, solution: Solution) -> dict[tuple[str, tuple[int, ...]], set[tuple[int, ...]]]:
        """By module and whole shape: what a device holds of the tensors that are made there, if the batch is whole."""
        found: dict[tuple[str, tuple[int, ...]], set[tuple[int, ...]]] = {}
        axis, devices = self.use.tensor, (self.mesh.sizes[self.use.tensor],)
        for group in solution.groups():
            for v, variable in enumerate(solution.part(group).variables):
                if not isinstance(variable, OpVariable) or self.sites.kind(variable.op):
                    continue  # what modules hand on that are split is said already
                option = variable.table.choice(group.choices[v]).options[axis]
                for tensor, state in zip(variable.call.results, option.results, strict=True):
                    local = local_shape(tensor.shape, (state,), devices)
                    for reason in self._everywhere(group, variable.op.module, ""):
                        found.setdefault((reason.place, tensor.shape), set()).add(local)
        return found

    def _split(self, part: BlockProblem, group: Group, v: int, variable: OpVariable) -> ModuleSplit | None:
        axis = self.use.tensor
        option = variable.table.choice(group.choices[v]).options[axis]
        kind = self.sites.kind(variable.op)
        split = split_of_module(kind, option, self.mesh.sizes[axis]) if kind else OTHER
        if not kind and not self._shares_weight(variable, option):
            return None
        stream = STREAM.get(kind, self._stream(variable))
        ends = [_ends(e, group)[0] for e in part.edges if e.target == v and e.operand == stream]
        found = ends[0][axis].value if ends else State("R")
        out = [_ends(e, group)[1] for e in part.edges if e.source == v]
        left = out[0][axis].value if out else option.results[0].value
        call = variable.call
        return ModuleSplit(
            variable.op.module, kind, split, found, left, call.operands[stream].shape, call.results[0].shape,
            call.results[0].dtype,
        )  # fmt: skip

    def _stream(self, variable: OpVariable) -> int:
        weights = [self.sites.is_parameter(name) for name in variable.op.operands]
        return weights.index(False) if False in weights else 0

    def _shares_weight(self, variable: OpVariable, option: Option) -> bool:
        """Whether it reads a whole weight while its work is split, so that the gradient is a partial sum."""
        return option.factor is not None and any(map(self.sites.is_parameter, variable.op.operands))


def _ends(edge: Edge, group: Group) -> tuple[tuple[State, ...], tuple[State, ...]]:
    source, target = edge.source_layouts[group.choices[edge.source]], edge.target_layouts[group.choices[edge.target]]
    return edge.space.layout(int(source)), edge.space.layout(int(target))


def used_axes(problem: Problem, solution: Solution) -> AxisUse:
    """The axis on which products split the batch, and the one on which they split anything else."""
    batch: set[int] = set()
    inner: set[int] = set()
    for group in solution.groups():
        for variable, choice in zip(solution.part(group).variables, group.choices, strict=False):
            if isinstance(variable, OpVariable) and variable.rule.flops:
                role = role_of(problem, variable)
                for axis, option in enumerate(variable.table.choice(choice).options):
                    if option.factor is not None:
                        (batch if role(option) == BATCH else inner).add(axis)
    data = min(batch - inner, default=-1)
    rest = [axis for axis, size in enumerate(problem.router.mesh.sizes) if size > 1 and axis != data]
    return AxisUse(rest[-1] if rest else -1, data)
