"""The options that good plans make use of: enough to look at where a mesh is only to be compared with others.

Of the seven options of a matrix product, good plans use three or four, whatever the mesh; with three axes that is
the difference between 343 choices and 27. So plans of simple meshes, where everything is looked at, say which
options there are to choose from on all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tapas.problem.problem import ModeVariable, OpVariable, Problem, Rows, Variable, WeightVariable
from tapas.rules.base import Call
from tapas.rules.options import Option
from tapas.search import Choices, count_choices

Options = Sequence[Option]


def _kind(call: Call) -> tuple:
    """Calls of the same kind have the same options, on any mesh."""
    return call.target, tuple(t.shape for t in (*call.operands, *call.results))


@dataclass
class Candidates:
    used: dict[tuple, set[str]] = field(default_factory=dict)  # kind of call -> names of options
    _wanted: dict[int, tuple[Options, Options]] = field(default_factory=dict)  # by the identity of what is available

    def note(self, problem: Problem, choices: Choices) -> None:
        """Remember what a plan does."""
        self._wanted.clear()
        for block, own in count_choices(problem.wiring, choices):
            for variable, choice in zip(problem.blocks[block].variables, own, strict=True):
                if isinstance(variable, OpVariable):
                    self.used.setdefault(_kind(variable.call), set()).update(variable.table.choice(choice).names)

    def wanted(self, call: Call, available: Options) -> Options:
        """The same list for the same list: meshes share what is made of it."""
        if id(available) not in self._wanted:
            used = self.used.get(_kind(call), set())
            self._wanted[id(available)] = available, [o for o in available if o.name in used] or available
        return self._wanted[id(available)][1]

    def outside(self, problem: Problem, rows: Rows) -> Rows:
        """The choices with candidates along the outermost axis, whatever they do along the others."""
        found = dict(rows)
        for b, part in enumerate(problem.blocks):
            for v, variable in enumerate(part.variables):
                if isinstance(variable, OpVariable):
                    named = np.array(
                        [option.name in self.used[_kind(variable.call)] for option in variable.table.options]
                    )
                    left = np.flatnonzero(named[variable.table.combos[:, 0]])
                    found[b, v] = np.intersect1d(left, rows[b, v]) if (b, v) in rows else left
        return found


def translated(choices: Choices, small: Problem, large: Problem) -> Choices | None:
    """The choices of a problem of candidates by the numbers of the whole problem, if they can be told; the blocks of
    that may be parted further."""
    known: dict[tuple, tuple[int, ...] | None] = {}
    found = []
    for copy, other, own in zip(small.folded.copies, large.folded.copies, choices, strict=True):
        key = copy.block, other.block, own
        if key not in known:
            pairs = zip(small.blocks[copy.block].variables, large.blocks[other.block].variables, own, strict=True)
            numbers = [_number(before, after, choice) for before, after, choice in pairs]
            known[key] = None if None in numbers else tuple(n for n in numbers if n is not None)
        found.append(known[key])
    return None if None in found else tuple(found)


def _number(before: Variable, after: Variable, choice: int) -> int | None:
    if isinstance(before, ModeVariable) or isinstance(after, ModeVariable):
        return choice
    if isinstance(before, OpVariable) and isinstance(after, OpVariable):
        wanted = before.table.choice(choice).options
        if not set(wanted) <= set(after.table.options):
            return None
        row = [after.table.options.index(option) for option in wanted]
        same = np.flatnonzero((after.table.combos == row).all(1))
    else:
        assert not isinstance(before, OpVariable) and not isinstance(after, OpVariable)
        numbers = before.stored if isinstance(before, WeightVariable) else before.allowed
        layout = after.space.find(before.space.layout(int(numbers[choice])))
        same = np.flatnonzero((after.stored if isinstance(after, WeightVariable) else after.allowed) == layout)
    return int(same[0]) if len(same) else None
