"""Number tables in, choices and a proof out: knows no torch and no graph."""

from tapas.search.branch_and_bound import solve_within
from tapas.search.contraction import contract
from tapas.search.cost_tables import Table, align_to_scope, diagonal_table, sum_by_scope, table
from tapas.search.engine import (
    WORK,
    Engine,
    EvaluatedChoices,
    LeastOvershoot,
    Overrun,
    SearchProblem,
    SearchResult,
)
from tapas.search.minimax import least_largest_load
from tapas.search.monitor import LogEntry, Monitor, Stopped, checkpoint, current_monitor
from tapas.search.multi_objective import Load, multi_objective
from tapas.search.network import BlockNetwork, Network, cost_of
from tapas.search.run_length import ChoiceRun, Choices, choice_runs, count_choices, run_lengths
from tapas.search.solver import SearchAnswer, solve, some_plan
from tapas.search.tied import coordinate_descent, copies_alike, quotient_network
from tapas.search.topology import BlockCopy, LazyCopies, Topology, topology_of

__all__ = [
    "WORK", "BlockCopy", "BlockNetwork", "ChoiceRun", "Choices", "Engine", "EvaluatedChoices", "LazyCopies",
    "LeastOvershoot", "Load", "LogEntry", "Monitor", "Network", "Overrun", "SearchAnswer", "SearchProblem",
    "SearchResult", "Stopped", "Table", "Topology", "align_to_scope", "checkpoint", "choice_runs", "contract",
    "coordinate_descent", "copies_alike", "cost_of", "count_choices", "current_monitor", "diagonal_table",
    "least_largest_load", "multi_objective", "quotient_network", "run_lengths", "solve", "solve_within", "some_plan",
    "sum_by_scope", "table", "topology_of",
]  # fmt: skip
