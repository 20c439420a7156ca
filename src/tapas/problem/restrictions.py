"""What a user insists on, as choices that are left of a problem."""

import re
from collections.abc import Mapping, Sequence

from tapas.errors import PlanError, nearest
from tapas.problem.baselines import NAMES, STRATEGIES, pin_strategy
from tapas.problem.pins import forbid as forbid_factor
from tapas.problem.pins import no_batch_split, pin_layout, pin_mode
from tapas.problem.problem import AUTO, Problem, Rows


def restrictions(
    pins: Sequence[tuple[str, str]],
    forbid: Sequence[tuple[str, str]],
    batch_split: bool = True,
    recompute: str = AUTO,
) -> tuple[str, ...]:
    """What a user insists on, as it was said: a plan is the best only among those that this leaves."""
    without = () if batch_split else ("--no-batch-split",)
    without += () if recompute == AUTO else (f"--recompute {recompute}",)
    return (*without, *(f"{a}={b}" for a, b in pins), *(f"--forbid {a}={b}" for a, b in forbid))


def restricted(
    problem: Problem,
    pins: Sequence[tuple[str, str]],
    forbid: Sequence[tuple[str, str]],
    batch_split: bool = True,
    hints: Mapping[str, str] | None = None,
    recompute: str = AUTO,
) -> Rows:
    rows: Rows = {} if batch_split else no_batch_split(problem)
    if recompute != AUTO:
        rows = {**rows, **pin_mode(problem, recompute)}
    for number, (pattern, what) in enumerate(pins):
        others = " or ".join(restrictions(pins[:number], (), batch_split))
        if what in STRATEGIES:
            rows = pin_strategy(problem, pattern, what, rows, hints, others)
        else:
            _check_word(pattern, what)
            rows = pin_layout(problem, pattern, what, rows, others)
    for number, (pattern, factor) in enumerate(forbid):
        others = " or ".join(restrictions(pins, forbid[:number], batch_split))
        rows = forbid_factor(problem, pattern, factor, rows, others)
    return rows


def _check_word(pattern: str, what: str) -> None:
    """A word that is no layout was meant to be a strategy."""
    if re.fullmatch(r"[A-Za-z][\w-]+", what):
        near = nearest(what, list(NAMES))
        advice = near if near.startswith("known") else f"{near} (known: {', '.join(NAMES)})"
        raise PlanError(
            f"--pin {pattern}={what}", f"there is no strategy {what}", f"{advice}; or give a layout such as [R, S(0)]"
        )
