"""Restrictions of a problem: which choices are left when a user, or a known strategy, insists.

Whatever is restricted this way is still solved to optimality, so a strategy is always shown at its best.
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from tapas.errors import PlanError
from tapas.ir.graph import Op
from tapas.ir.patterns import matches
from tapas.problem.problem import (
    BlockProblem,
    LayoutVariable,
    ModeVariable,
    OpVariable,
    Problem,
    Rows,
    TensorVariable,
    WeightVariable,
    check_mode,
)
from tapas.rules.base import MODES
from tapas.rules.choices import Option
from tapas.sharding.layout import State, parse_state


@dataclass(frozen=True)
class NamedVariable:
    """A variable with the names it goes by."""

    block: int
    variable: LayoutVariable
    names: tuple[str, ...]
    stream: bool  # a tensor that passes between copies of a repeated block, or into its first copy
    role: Callable[[Option], str]  # of an operator's option: "batch", "sequence" or ""
    dim_role: Callable[[int], str]  # of a tensor's dim


OTHERS = "the other pins"
OpTest = Callable[[NamedVariable, Option, int], bool]  # option, axis
StateTest = Callable[[NamedVariable, State, int], bool]  # state, axis


def named_variables(problem: Problem) -> dict[tuple[int, int], NamedVariable]:
    repeated = [b for b in range(len(problem.blocks)) if problem.copies[b] > 1]
    streams = {problem.name_of(name) for b in repeated for name in problem.folded.blocks[b].exports}
    found = {}
    for b, part in enumerate(problem.blocks):
        for v, variable in enumerate(part.variables):
            if isinstance(variable, ModeVariable):
                continue
            stream = v in part.exports and problem.name_of(part.block.exports[part.exports.index(v)]) in streams
            found[b, v] = NamedVariable(
                b, variable, _names(problem, part, v), stream, role_of(problem, variable), _dim_role(problem, variable)
            )
    return found


def _names(problem: Problem, part: BlockProblem, v: int) -> tuple[str, ...]:
    variable = part.variables[v]
    assert not isinstance(variable, ModeVariable)
    if isinstance(variable, OpVariable):
        return (variable.op.module or variable.op.name, variable.op.name)
    leaf = problem.folded.leaf_of.get(variable.tensor.name)
    if leaf is not None:
        return leaf.paths
    edge = next(e for e in part.edges if e.target == v)  # a tensor goes by the module that made it
    maker = part.variables[edge.source]
    return (maker.op.module or maker.op.name,) if isinstance(maker, OpVariable) else _names(problem, part, edge.source)


def role_of(problem: Problem, variable: LayoutVariable) -> Callable[[Option], str]:
    if not isinstance(variable, OpVariable):
        return lambda option: ""
    op = variable.op
    kinds = Op(
        op.name, op.target, tuple(map(problem.name_of, op.operands)), tuple(map(problem.name_of, op.results)), (), ()
    )
    return lambda option: problem.roles.of(kinds, option.factor)


def _dim_role(problem: Problem, variable: LayoutVariable) -> Callable[[int], str]:
    if isinstance(variable, OpVariable):
        return lambda dim: ""
    name = problem.name_of(variable.tensor.name)
    return lambda dim: problem.roles.of_dim(name, dim)


def always(*_) -> bool:
    return True


def restrict(
    problem: Problem,
    op: OpTest = always,
    weight: StateTest = always,
    tensor: StateTest = always,
    rows: Rows | None = None,
    place: str = "pins",
    others: str = OTHERS,
    somewhere: bool = False,
) -> dict[tuple[int, int], np.ndarray]:
    """The choices that pass the tests on every axis of more than one device (`somewhere`: on at least one), on top of
    what `rows` leaves. `others` is where those come from, for the error if the two contradict each other."""
    left = dict(rows or {})
    axes = list(enumerate(problem.router.mesh.sizes))
    either = not somewhere
    for key, site in named_variables(problem).items():
        variable = site.variable
        if isinstance(variable, OpVariable):
            if op is always:
                continue
            passes = np.array([[either if n == 1 else op(site, o, a) for a, n in axes] for o in variable.table.options])
            combos, count = variable.table.combos, len(variable.table)
        else:
            test = weight if isinstance(variable, WeightVariable) else tensor
            if test is always:
                continue
            numbers = variable.stored if isinstance(variable, WeightVariable) else variable.allowed
            passes = np.array(
                [[either if n == 1 else test(site, s, a) for a, n in axes] for s in variable.space.states]
            )
            combos, count = variable.space.combos[numbers], len(numbers)
        passed = passes[combos, np.arange(combos.shape[1])]
        ok = passed.any(1) if somewhere else passed.all(1)
        mine = np.flatnonzero(ok)
        if not len(mine):
            raise PlanError(f"{place}: {site.names[0]}", "it cannot be split like that here", _possible(site, axes))
        if key in left:
            mine = np.intersect1d(mine, left[key])
        if not len(mine):
            raise _contradiction(place, site, others)
        if len(mine) < count:
            left[key] = mine
    return left


def _possible(site: NamedVariable, axes: list[tuple[int, int]]) -> str:
    """What a variable can be along each axis that splits anything."""
    variable = site.variable
    if isinstance(variable, OpVariable):
        states = [str(option.results[0]) for option in variable.table.options]
        combos = variable.table.combos
    else:
        states = list(map(str, variable.space.states))
        combos = variable.space.combos[variable.stored if isinstance(variable, WeightVariable) else variable.allowed]
    each = [", ".join(dict.fromkeys(states[i] for i in np.unique(combos[:, a]))) for a, n in axes if n > 1]
    return f"it can be {' and '.join(dict.fromkeys(each)) or 'R'} along an axis; use one of these, or another mesh"


def _contradiction(place: str, site: NamedVariable, others: str) -> PlanError:
    return PlanError(f"{place}: {site.names[0]}", f"contradicts {others}", "drop one of them")


def common(
    problem: Problem, one: Rows, two: Rows, place: str, others: str = OTHERS
) -> dict[tuple[int, int], np.ndarray]:
    """The choices that both leave."""
    left = {**one, **two}
    for key in one.keys() & two.keys():
        left[key] = np.intersect1d(one[key], two[key])
        if not len(left[key]):
            raise _contradiction(place, named_variables(problem)[key], others)
    return left


def speaking(sites: Iterable[NamedVariable]) -> list[str]:
    """Names that are in the user's code: parameters and modules, with those that they lie in; operators only where
    there is nothing else."""
    sites = list(sites)
    own = [name for s in sites for name in s.names if not isinstance(s.variable, OpVariable)]
    own += [s.variable.op.module for s in sites if isinstance(s.variable, OpVariable) and s.variable.op.module]
    above = {".".join(name.split(".")[:i]) for name in own for i in range(1, name.count(".") + 2)}
    return sorted(above) or [name for s in sites for name in s.names]


def unmatched(pattern: str, names: Iterable[str]) -> str:
    """A remedy for a pattern that nothing matches: the names that are nearest to it."""
    known = sorted(set(names))
    bare = pattern.strip("*.")
    near = difflib.get_close_matches(bare, known, 3, 0.6)
    tail = bare.rpartition(".")[2].strip("*")
    if not near and tail:
        ends = {name.rpartition(".")[2]: name for name in reversed(known)}
        near = [ends[end] for end in difflib.get_close_matches(tail, list(ends), 3, 0.6)]
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"names are such as {', '.join(known[:3])}"


def parse_layout(text: str, axes: int, place: str) -> tuple[State, ...]:
    """`[R, S(0)]`, a state for each axis, or a state without brackets that holds for all of them."""
    text = text.strip()
    brackets = text.startswith("[")
    inner = text[1:-1] if brackets and text.endswith("]") else text
    if "[" in inner or "]" in inner:
        raise PlanError(place, "its brackets are not a pair", "write a layout like S(0) or [R, S(1)]")
    parts = [p.strip() for p in inner.replace("),", ");").replace(",", ";").split(";")]
    try:
        states = tuple(parse_state(p) for p in parts)
    except ValueError as error:
        raise PlanError(place, str(error), "write a layout like S(0) or [R, S(1)], one state per mesh axis") from None
    if len(states) == 1 and not brackets:
        states = states * axes
    if len(states) != axes:
        fact = f"{len(states)} {'state' if len(states) == 1 else 'states'} for {axes} mesh axes"
        raise PlanError(place, fact, f"write one state per axis in brackets, or {parts[0]} alone for all")
    return states


def _check_layout(site: NamedVariable, wanted: tuple[State, ...], place: str) -> None:
    """Refuse what no mesh could give, with the reason."""
    variable = site.variable
    if isinstance(variable, WeightVariable) and any(s.kind in "PB" for s in wanted):
        raise PlanError(place, f"{site.names[0]} is a weight", "weights are stored split, S(dim), or whole, R")
    shape = variable.call.results[0].shape if isinstance(variable, OpVariable) else variable.tensor.shape
    if any(s.dim >= len(shape) for s in wanted):
        dims = " × ".join(map(str, shape))
        many = "dim" if len(shape) == 1 else "dims"
        remedy = f"split one of 0 to {len(shape) - 1}" if len(shape) > 1 else "split dim 0" if shape else "use R"
        raise PlanError(place, f"{site.names[0]} has {len(shape)} {many} ({dims or 'a scalar'})", remedy)


def pin_layout(
    problem: Problem, pattern: str, text: str, rows: Rows, others: str = OTHERS
) -> dict[tuple[int, int], np.ndarray]:
    """Pin weights (their storage) or operators (their result) that match a pattern to a layout."""
    place = f"--pin {pattern}={text}"
    wanted = parse_layout(text, len(problem.router.mesh.sizes), place)
    everything = [s for s in named_variables(problem).values() if not isinstance(s.variable, TensorVariable)]

    def named(site: NamedVariable) -> bool:
        return any(matches(name, pattern) for name in site.names)

    chosen = [s for s in everything if named(s)]
    if not chosen:
        buffers = (leaf.paths[0] for leaf in problem.folded.leaves if leaf.kind == "buffer")
        if whole := next((name for name in buffers if matches(name, pattern)), None):
            remedy = "pin what reads it; of buffers, the large ones that products read are weights"
            raise PlanError(place, f"{whole} is a buffer that every device has whole", remedy)
        raise PlanError(place, "no parameter or module matches this pattern", unmatched(pattern, speaking(everything)))
    weights = [s for s in chosen if isinstance(s.variable, WeightVariable)]
    for site in weights or chosen:
        _check_layout(site, wanted, place)

    def op(site: NamedVariable, option: Option, axis: int) -> bool:
        return bool(weights) or not named(site) or option.results[0] == wanted[axis]

    def weight(site: NamedVariable, state: State, axis: int) -> bool:
        return not named(site) or state == wanted[axis]

    return restrict(problem, op=op, weight=weight, rows=rows, place=place, others=others)


def pin_mode(problem: Problem, mode: str) -> dict[tuple[int, int], np.ndarray]:
    """All blocks that can do so treat their activations in one way."""
    check_mode(mode)
    able = [(b, part.mode) for b, part in enumerate(problem.blocks) if part.mode is not None]
    return dict.fromkeys(able, np.array([MODES.index(mode)]))
