"""From a search's answer to a plan that a person can read: copies that do the same become one pattern."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from operator import attrgetter
from typing import Any

from tapas.hardware.cluster_files import cluster_to_dict
from tapas.hardware.mesh import uneven_axes
from tapas.ir.fold import Folded
from tapas.ir.patterns import container, containers, inside, pattern_at
from tapas.plan.assignment import gathered_ahead
from tapas.plan.fingerprint import main_dtype, tensor_references
from tapas.plan.plan import MemoryPoint, Move, Operator, Plan, PlanBlock
from tapas.plan.traffic import kernel_collectives
from tapas.planner.assignment import assignment_of
from tapas.planner.axis_use import uneven_batch
from tapas.planner.solution import Group, Solution, Transfer, layout_of
from tapas.problem.problem import BlockProblem, ModeVariable, OpVariable, Problem, TensorVariable, WeightVariable
from tapas.rules.base import RECOMPUTED, repeated
from tapas.rules.notation import factors_text
from tapas.search import topology_of
from tapas.sharding.layout import Layout
from tapas.util import picking

OPTIMAL = "optimal"  # the proof of a plan
TOLERANCE = 1e-9  # relative: sums of the same numbers in another order


def texts(layout: Layout) -> tuple[str, ...]:
    return tuple(map(str, layout))


class _Names:
    """Patterns for groups of copies."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        stretches = topology_of(folded.copies).copy_ranges
        self.paths = list(map(attrgetter("path"), folded.copies))
        self.places = [p for _, c, times in stretches for p in containers(self.paths[c : c + times])]
        modules = {op.module for block in folded.blocks for op in block.ops}
        ends = (module[: m.end()] for module in modules for m in re.finditer(r"(?:^|\.)\d+(?=\.|$)", module))
        numbered = {*self.places, *map(container, ends)}
        self.members = Counter([place[0] for place in numbered if place])
        self.first: dict[int, str] = {}  # paths of first copies, by block
        for block, first, _ in stretches:
            self.first.setdefault(block, self.paths[first])

    def pattern(self, copies: tuple[int, ...]) -> str:
        return pattern_at(self.paths[copies[0]], picking(copies)(self.places), self.members)

    def module(self, name: str, block: int, pattern: str) -> str:
        """The module of an operator of a block's first copy, as a pattern over some copies."""
        first = self.first[block]
        return inside(name, first, pattern) if first else name

    def weight(self, position: int, copy: int, pattern: str) -> list[str]:
        """The names of one of a block's weights in the copies of a pattern, of which one is given; several when
        weights are tied."""
        path, leaf = self.paths[copy], self.folded.leaf_of[self.folded.copies[copy].weights[position]]
        return [inside(name, path, pattern) if path else name for name in leaf.paths]


def proof_text(cost: float, bound: float) -> str:
    gap = max(0.0, cost - bound)
    return OPTIMAL if gap <= TOLERANCE * max(abs(cost), 1e-30) else f"gap {gap:.3g} s ({gap / cost:.2%})"


def _merged(groups: list[Group], own: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Copies by the choices of the block's own variables."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for group in groups:
        found[group.choices[:own]] += group.copies
    return {choices: tuple(sorted(copies)) for choices, copies in found.items()}


def _moves(solution: Solution, names: _Names, group: Group) -> list[Move]:
    part, pattern, found = solution.part(group), names.pattern(group.copies), []
    for transfer in solution.transfers(group):
        edge = transfer.edge
        target = part.variables[edge.target]
        module = target.op.module if isinstance(target, OpVariable) else _reader(solution, group, edge.target)
        weight = edge.source < len(part.variables) and isinstance(part.variables[edge.source], WeightVariable)
        at = names.module(module, group.block, pattern)
        leaf = solution.problem.folded.leaf_of.get(edge.tensor)
        tensor = names.module(leaf.paths[0] if leaf and leaf.paths else edge.tensor, group.block, pattern)
        move = _move(solution, group, transfer, tensor, at, pattern or part.block.name, weight)
        found.append(replace(move, copy=group.copies[0], numbers=group.copies, **_ends(part, transfer)))
    return found


def _ends(part: BlockProblem, transfer: Transfer) -> dict[str, Any]:
    """Between which places of a block's structure a tensor is moved."""
    operators = [v for v, variable in enumerate(part.variables) if isinstance(variable, OpVariable)]
    target = transfer.edge.target
    return {
        "source": tensor_references(part.block)[transfer.edge.tensor],
        "reader": operators.index(target) if target in operators else -1,
    }


def _reader(solution: Solution, group: Group, variable: int) -> str:
    """Where a tensor variable sits: at the operator that made the tensor."""
    part = solution.part(group)
    edge = next(e for e in part.edges if e.target == variable)
    source = part.variables[edge.source] if edge.source < len(part.variables) else None
    return source.op.module if isinstance(source, OpVariable) else ""


def _move(solution: Solution, group: Group, transfer: Transfer, tensor: str, at: str, block: str, weight: bool) -> Move:
    edge, axis_names = transfer.edge, solution.problem.router.mesh.names
    beside = len(list(takewhile(gathered_ahead, [m.hop for m in transfer.moves]))) if weight else 0
    steps = tuple(
        {
            "axes": [axis_names[a] for a in m.axes], "forward": m.forward, "backward": m.backward,
            "nbytes": m.nbytes, "forward_seconds": m.forward_seconds, "backward_seconds": m.backward_seconds,
            "beside": i < beside,  # what is computed: nobody waits where the weight is read
            "again": transfer.again if i < beside else solution.mode(group) in RECOMPUTED,
        }
        for i, m in enumerate(transfer.moves)
    )  # fmt: skip
    return Move(
        tensor, at, texts(edge.space.layout(transfer.source)),
        texts(edge.space.layout(transfer.target)), steps, max(m.nbytes for m in transfer.moves), transfer.seconds,
        transfer.hidden_seconds, len(group.copies), block,
        "weight" if weight else "activation", transfer.again,
    )  # fmt: skip


def assemble(solution: Solution, baselines: dict[str, dict[str, Any]], pieces: int = 1, **extra: Any) -> Plan:
    problem = solution.problem
    folded, names = problem.folded, _Names(problem.folded)
    groups = sorted(solution.groups(), key=lambda g: g.copies)
    operators: list[Operator] = []
    parameters: dict[str, list[str]] = {}
    shapes: dict[str, list[int]] = {}
    tied: dict[str, str] = {}
    blocks: list[PlanBlock] = []
    moves = [move for group in groups for move in _moves(solution, names, group)]
    for b, part in enumerate(problem.blocks):
        own = len(part.variables)
        here = [g for g in groups if g.block == b]
        for choices, copies in _merged(here, own).items():
            pattern = names.pattern(copies)
            name = pattern if names.paths[copies[0]] else part.block.name
            compute = communication = beside = 0.0
            position = 0
            for variable, choice in zip(part.variables, choices, strict=True):
                match variable:
                    case OpVariable():
                        made = _operator(problem, variable, choice, names, b, pattern, name, len(copies))
                        again = repeated(part.mode_of(choices), variable.rule)
                        sent = _sent_nbytes(variable, made.choice, again, problem.router.mesh.sizes)
                        operators.append(replace(made, again=again, sent_nbytes=sent))
                        compute += made.seconds
                        communication += made.communication
                        beside += made.hidden
                        if operators[-1].again:
                            compute += float(variable.table.again_seconds[choice])
                    case WeightVariable():
                        first, *others = names.weight(position, copies[0], pattern)
                        tied |= dict.fromkeys(others, first)
                        for path in (first, *others):
                            parameters[path] = list(texts(layout_of(variable, choice)))
                            shapes[path] = list(variable.tensor.shape)
                        position += 1
                    case TensorVariable() | ModeVariable():
                        pass
            moved, hidden = _moved_seconds(solution, here, choices)
            waiting = communication + moved / len(copies)
            paths = tuple(filter(None, picking(copies)(names.paths)))
            ops, mode = len(part.block.ops), part.mode_of(choices)
            hidden = hidden / len(copies) + beside
            blocks.append(PlanBlock(name, len(copies), ops, compute, waiting, paths, mode, hidden, copies))
    unread = _unread(problem)
    parameters |= {path: ["R"] * len(problem.router.mesh.sizes) for path in unread}
    shapes |= unread
    answer = solution.answer
    mesh = problem.router.mesh
    return Plan(
        model=folded.name,
        mesh={"names": list(mesh.names), "sizes": list(mesh.sizes)},
        cluster=cluster_to_dict(problem.router.cluster),
        training=folded.training,
        inputs=_inputs(folded),
        cost=answer.cost,
        bound=answer.bound,
        proof=proof_text(answer.cost, answer.bound),
        seconds=_seconds(solution),
        memory=solution.memory(),
        parameters=parameters,
        operators=tuple(operators),
        moves=tuple(moves),
        blocks=tuple(blocks),
        baselines=baselines,
        assignment=assignment_of(solution, pieces),
        shapes=shapes,
        tied=tied,
        dtype=main_dtype(folded),
        versions=_versions(),
        optimizer=problem.optimizer.name,
        master=problem.optimizer.master,
        timeline=tuple(MemoryPoint(*point) for point in solution.memory_over_time()),
        **extra,
    )  # fmt: skip


def _moved_seconds(solution: Solution, groups: list[Group], own: tuple[int, ...]) -> tuple[float, float]:
    """What all copies of a block that choose the same wait for moves; and what hides."""
    mine = [group for group in groups if group.choices[: len(own)] == own]
    moved = [(len(group.copies), t) for group in mine for t in solution.transfers(group)]
    return sum(times * t.seconds for times, t in moved), sum(times * t.hidden_seconds for times, t in moved)


def _unread(problem: Problem) -> dict[str, list[int]]:
    """Paths and shapes of parameters that no operator reads."""
    folded = problem.folded
    return {
        path: list(folded.tensors[name].shape) for name in sorted(problem.unread) for path in folded.leaf_of[name].paths
    }


def _inputs(folded: Folded) -> dict[str, list[int]]:
    shapes = {leaf: list(folded.tensors[leaf.tensor].shape) for leaf in folded.inputs}
    return {leaf.paths[0] if leaf.paths else leaf.tensor: shape for leaf, shape in shapes.items()}


def _versions() -> dict[str, str]:
    """Of what decides how a model is captured."""
    found = {}
    for name in ("tapas-parallel", "torch", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _operator(
    problem: Problem, variable: OpVariable, choice: int, names: _Names, block: int, pattern: str, name: str, copies: int
) -> Operator:
    made = variable.table.choice(choice)
    t = variable.table
    kinds = replace(
        variable.op,
        operands=tuple(map(problem.name_of, variable.op.operands)),
        results=tuple(map(problem.name_of, variable.op.results)),
    )
    leaves = [problem.folded.leaf_of.get(operand) for operand in variable.op.operands]
    read = [leaf.paths[0] for leaf in leaves if leaf and leaf.kind == "parameter" and leaf.paths]
    return Operator(
        module=names.module(variable.op.module, block, pattern),
        target=variable.op.target,
        choice=tuple(map(str, made.options)),
        result=texts(made.result(0)),
        seconds=float(t.forward_seconds[choice] + t.backward_seconds[choice]),
        communication=float(t.kernel_seconds[choice]),
        hidden=float(t.hidden_seconds[choice]),
        copies=copies,
        name=variable.op.name,
        block=name,
        missing_rule=variable.rule.missing,
        roles=tuple(problem.roles.of(kinds, option.factor) for option in made.options),
        weights=tuple(names.module(path, block, pattern) for path in read),
        factors=factors_text(variable.rule, variable.call),
        operands=tuple(t.shape for t in variable.call.operands),
        results=tuple(t.shape for t in variable.call.results),
        forward=float(t.forward_seconds[choice]),
        sent_forward=float(t.again_seconds[choice] - t.forward_seconds[choice]),
        capacity=max((option.capacity for option in made.options), default=0.0),
    )


def _sent_nbytes(variable: OpVariable, choice: Sequence[str], again: bool, mesh: Sequence[int]) -> int:
    """By an operator's sharded implementation, in one copy."""
    messages = kernel_collectives(variable.rule, choice, mesh)
    return sum(nbytes * (1 + (again and phase == "forward")) for (phase, _, _), nbytes in messages)


def _seconds(solution: Solution) -> dict[str, float]:
    kinds = solution.seconds()
    return {"compute": kinds["forward"] + kinds["backward"] + kinds["again"] + kinds["update"], **kinds}


def _more_room(available: float, baselines: dict[str, dict[str, Any]]) -> str:
    """What to do today about a plan that does not fit: memory is no constraint of the search."""
    fitting = [(f["cost"], name) for name, f in baselines.items() if f["cost"] is not None and f["memory"] <= available]
    best = min(fitting, default=None)
    pin = f"; or take what fits: {best[1]} does (--pin '*={best[1]}')" if best else ""
    return f"use more devices, or a smaller batch (--batch){pin}"


def warnings_of(
    problem: Problem, plan_memory: dict[str, int], solution: Solution, baselines: dict[str, dict[str, Any]]
) -> list[str]:
    """What a user should know before using the plan."""
    found = [*uneven_axes(problem.router.mesh, problem.router.cluster), *uneven_batch(problem, solution.answer.choices)]
    used = sum(plan_memory.values())
    available = problem.router.cluster.device.memory_bytes
    if used > available:
        device = problem.router.cluster.device.name
        needs = f"needs about {used / 1e9:.0f} GB per device, {device} has {available / 1e9:.0f} GB"
        found.append(f"{needs}: {_more_room(available, baselines)}")
    if problem.unread:
        names = [
            folded_leaf.paths[0] for folded_leaf in map(problem.folded.leaf_of.__getitem__, sorted(problem.unread))
        ]
        found.append(
            f"no operator reads {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}: kept whole everywhere"
        )
    found += [
        f"no rule for {key.partition('(')[0]}: it was tried out, and splits as {factors}"
        for key, factors in problem.folded.found.items()
        if factors
    ]
    missing: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for group in solution.groups():
        for variable, choice in zip(solution.part(group).variables, group.choices, strict=False):
            if isinstance(variable, OpVariable) and variable.rule.missing:
                key = variable.op.target, variable.rule.unknown_work
                missing[key].append(len(group.copies) * float(variable.seconds[choice]))
    for (target, unknown), seconds in missing.items():
        took = "its arithmetic is not known and not counted" if unknown else f"{sum(seconds):.2g} s per step"
        found.append(f"no rule for {target}: runs whole on every device, {took}")
    return found
