"""What a user insists on, as choices that are left of a problem."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tapas.errors import PlanError, nearest
from tapas.problem.baselines import NAMES, STRATEGIES, pin_strategy
from tapas.problem.factor_pins import forbid as forbid_factor
from tapas.problem.factor_pins import names_factors, no_batch_split, pin_factor
from tapas.problem.pins import pin_layout, pin_mode
from tapas.problem.problem import AUTO, Problem, Rows

Pairs = tuple[tuple[str, str], ...]  # pattern -> what


@dataclass(frozen=True, slots=True)
class Constraints:
    """A plan is the best only among those that these leave."""

    pins: Pairs = ()
    forbid: Pairs = ()
    batch_split: bool = True
    recompute: str = AUTO
    hints: Mapping[str, str] | None = None  # transformers' own tp_plan, pattern -> style

    @property
    def patterns(self) -> list[str]:
        return [pattern for pattern, _ in (*self.pins, *self.forbid)]

    @property
    def texts(self) -> tuple[str, ...]:
        """As the user said them."""
        without = () if self.batch_split else ("--no-batch-split",)
        without += () if self.recompute == AUTO else (f"--recompute {self.recompute}",)
        return (*without, *(f"{a}={b}" for a, b in self.pins), *(f"--forbid {a}={b}" for a, b in self.forbid))

    def rows(self, problem: Problem) -> Rows:
        """The choices that are left."""
        rows: Rows = {} if self.batch_split else no_batch_split(problem)
        if self.recompute != AUTO:
            rows = {**rows, **pin_mode(problem, self.recompute)}
        for number, (pattern, what) in enumerate(self.pins):
            others = self._before(number, 0)
            if what in STRATEGIES:
                rows = pin_strategy(problem, pattern, what, rows, self.hints, others)
            elif names_factors(problem, pattern, what):
                rows = pin_factor(problem, pattern, what, rows, others)
            else:
                _check_word(pattern, what)
                rows = pin_layout(problem, pattern, what, rows, others)
        for number, (pattern, factor) in enumerate(self.forbid):
            rows = forbid_factor(problem, pattern, factor, rows, self._before(len(self.pins), number))
        return rows

    def _before(self, pins: int, forbid: int) -> str:
        """What one of them may contradict: those before it."""
        earlier = replace(self, pins=self.pins[:pins], forbid=self.forbid[:forbid], recompute=AUTO)
        return " or ".join(earlier.texts)


def _check_word(pattern: str, what: str) -> None:
    """A word that is neither a layout nor a factor was meant to be a strategy."""
    if re.fullmatch(r"[A-Za-z][\w-]+", what):
        near = nearest(what, list(NAMES))
        advice = near if near.startswith("known") else f"{near} (known: {', '.join(NAMES)})"
        other = "or give a layout such as [R, S(0)], or a factor of what matches, such as batch"
        raise PlanError(f"--pin {pattern}={what}", f"there is no strategy {what}", f"{advice}; {other}")
