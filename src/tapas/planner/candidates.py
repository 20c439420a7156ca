"""The options that good plans make use of: enough to look at where a mesh is only to be compared with others.

Of the seven options of a matrix product, good plans use three or four, whatever the mesh; with three axes that is
the difference between 343 choices and 27. So plans of simple meshes, where everything is looked at, say which
options there are to choose from on all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tapas.problem.problem import OpVariable, Problem, Rows
from tapas.rules.base import Call
from tapas.rules.choices import Option
from tapas.search import Choices, count_choices

Options = Sequence[Option]
WHOLE = {"R", "B"}


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
            if any(o.factor and (o.factor.joint or o.factor.least) for o in available if o.name in used):
                used = used | WHOLE  # these are over one axis: something has to be done along the others
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
