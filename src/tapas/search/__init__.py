"""Number tables in, choices and a proof out: knows no torch and no graph."""

from tapas.search.contraction import contract
from tapas.search.cost_tables import Table, align_to_scope, diagonal_table, sum_by_scope, table
from tapas.search.lagrangian import WORK, EvaluatedChoices, LeastOvershoot, LimitedAnswer, Overrun, solve_within
from tapas.search.minimax import least_largest_load
from tapas.search.multi_objective import Load, multi_objective
from tapas.search.network import BlockNetwork, Network, cost_of
from tapas.search.run_length import ChoiceRun, Choices, choice_runs, count_choices
from tapas.search.solver import SearchAnswer, solve
from tapas.search.tied import coordinate_descent, copies_alike, quotient_network
from tapas.search.topology import BlockCopy, LazyCopies, Topology, topology_of

__all__ = [
    "WORK", "BlockCopy", "BlockNetwork", "ChoiceRun", "Choices", "EvaluatedChoices", "LazyCopies", "LeastOvershoot",
    "LimitedAnswer", "Load", "Network", "Overrun", "SearchAnswer", "Table", "Topology", "align_to_scope", "choice_runs",
    "contract", "coordinate_descent", "copies_alike", "cost_of", "count_choices", "diagonal_table",
    "least_largest_load", "multi_objective",
    "quotient_network", "solve", "solve_within", "sum_by_scope", "table", "topology_of",
]  # fmt: skip
