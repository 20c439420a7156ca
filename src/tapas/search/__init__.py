"""Number tables in, choices and a proof out: knows no torch and no graph."""

from tapas.search.contract import align_to_scope, contract
from tapas.search.folded import SearchAnswer, coordinate_descent, copies_alike, quotient_network, solve
from tapas.search.limited import solve_within
from tapas.search.measures import Load, multi_objective
from tapas.search.network import BlockNetwork, Network, cost_of
from tapas.search.outcome import EvaluatedChoices, LeastOvershoot, LimitedAnswer
from tapas.search.runs import ChoiceRun, Choices, choice_runs, count_choices
from tapas.search.tables import Table, diagonal_table, sum_by_scope, table
from tapas.search.wires import BlockCopy, LazyCopies
from tapas.search.wiring import Topology, topology_of

__all__ = [
    "BlockCopy", "BlockNetwork", "ChoiceRun", "Choices", "EvaluatedChoices", "LazyCopies", "LeastOvershoot",
    "LimitedAnswer", "Load", "Network", "SearchAnswer", "Table", "Topology", "align_to_scope", "choice_runs",
    "contract", "coordinate_descent", "copies_alike", "cost_of", "count_choices", "diagonal_table", "multi_objective",
    "quotient_network", "solve", "solve_within", "sum_by_scope", "table", "topology_of",
]  # fmt: skip
