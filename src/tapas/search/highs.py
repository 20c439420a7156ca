"""Linear programs, over whole numbers or not, handed to HiGHS."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tapas.search.monitor import current_monitor

if TYPE_CHECKING:
    from highspy import Highs
    from highspy.highs import HighsCallbackEvent

FEASIBLE = 1e-9  # absolute: whoever poses a program brings its numbers to about one


class SparseRow(NamedTuple):
    """A weighted sum of some columns is within bounds."""

    columns: np.ndarray
    weights: np.ndarray
    low: float
    high: float


def run_highs(
    costs: np.ndarray, lower: np.ndarray, upper: np.ndarray, rows: Sequence[SparseRow], integers: int = 0,
    **options: float | str,
) -> tuple["Highs", bool]:  # fmt: skip
    """The solver after it has minimised the cost, with the first so many columns whole numbers; whether it came to
    an end.

    >>> at_least_one = SparseRow(np.array([0, 1]), np.array([1.0, 1.0]), 1.0, np.inf)
    >>> solver, _ = run_highs(np.array([3.0, 2.0]), np.zeros(2), np.ones(2), [at_least_one])
    >>> list(solver.getSolution().col_value)
    [0.0, 1.0]
    """
    import highspy  # only limits need it

    solver = highspy.Highs()
    usual: dict[str, float | str] = {
        "output_flag": False, "threads": 1, "random_seed": 0, "primal_feasibility_tolerance": FEASIBLE,
        "dual_feasibility_tolerance": FEASIBLE, "mip_feasibility_tolerance": FEASIBLE,
    }  # fmt: skip
    for option, value in (usual | options).items():
        solver.setOptionValue(option, value)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(costs), len(rows)
    model.col_cost_, model.col_lower_, model.col_upper_ = costs, lower, upper
    model.row_lower_ = np.array([row.low for row in rows])
    model.row_upper_ = np.array([row.high for row in rows])
    if integers:
        kinds = highspy.HighsVarType
        model.integrality_ = [kinds.kInteger] * integers + [kinds.kContinuous] * (len(costs) - integers)
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.concatenate([[0], np.cumsum([len(row.columns) for row in rows])]).astype(np.int32)
    matrix.index_ = np.concatenate([row.columns for row in rows]).astype(np.int32)
    matrix.value_ = np.concatenate([row.weights for row in rows])
    solver.passModel(model)
    monitor = current_monitor()
    if monitor is not None and integers:  # a program over whole numbers may take seconds

        def end(event: "HighsCallbackEvent") -> None:
            if monitor.stopped:
                event.interrupt()

        solver.cbMipInterrupt += end
    # threads are those of the process: others may have asked for more of them, or want to
    highspy.Highs.resetGlobalScheduler(True)
    status = solver.run()
    highspy.Highs.resetGlobalScheduler(True)
    return solver, status != highspy.HighsStatus.kError
