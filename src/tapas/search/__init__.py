"""Number tables in, choices and a proof out: knows no torch and no graph."""

from tapas.search.folded import Answer, solve
from tapas.search.limited import solve_within
from tapas.search.measures import Load
from tapas.search.network import Block, Network, cost_of
from tapas.search.outcome import Least, Limited, Seen
from tapas.search.tables import Table, table
from tapas.search.wires import Copy, Wires

__all__ = [
    "Answer", "Block", "Copy", "Least", "Limited", "Load", "Network", "Seen", "Table", "Wires", "cost_of",
    "solve", "solve_within", "table",
]  # fmt: skip
