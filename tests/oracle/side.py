"""A network with limits as an integer program, for HiGHS: tables of any number of variables, copies written out.

One binary x for every variable and choice, one y >= 0 for every entry of every table; the y of a table that go with
a choice of one of its variables add up to that x. Costs and amounts are those of the y.
"""

from collections.abc import Sequence

import highspy
import numpy as np

from tapas.search import Load, Network, Table, diagonal_table


def _unfolded(network: Network, tables: Sequence[Sequence[Table]]) -> tuple[list[Table], list[int]]:
    sizes, first = [], []
    for copy in network.copies:
        first.append(len(sizes))
        sizes += network.blocks[copy.block].sizes[: network.blocks[copy.block].own]
    found = []
    for c, copy in enumerate(network.copies):
        own = network.blocks[copy.block].own
        names = [*range(first[c], first[c] + own), *(first[source] + v for source, v in copy.ports)]
        found += [diagonal_table([names[v] for v in t.scope], t.array) for t in tables[copy.block]]
    return found, sizes


def least_within(network: Network, loads: Sequence[Load]) -> float | None:
    """The least cost within all limits; None if there is no plan."""
    costs, sizes = _unfolded(network, [block.tables for block in network.blocks])
    solver = highspy.Highs()
    for option, value in {"output_flag": False, "threads": 1, "mip_rel_gap": 0.0, "mip_abs_gap": 1e-9}.items():
        solver.setOptionValue(option, value)
    x = [[solver.addVariable(0, 1, type=highspy.HighsVarType.kInteger) for _ in range(size)] for size in sizes]
    for mine in x:
        solver.addConstr(sum(mine[1:], start=mine[0] * 1.0) == 1)

    def total(tables: Sequence[Table]) -> highspy.highs_linear_expression:
        found = solver.addVariable(0, 0) * 1.0
        for t in tables:
            index = np.ndindex(*t.array.shape)
            y = {entry: solver.addVariable(0, 1 if np.isfinite(t.array[entry]) else 0) for entry in index}
            for dim, v in enumerate(t.scope):
                for choice, there in enumerate(x[v]):
                    members = [mine for entry, mine in y.items() if entry[dim] == choice]
                    solver.addConstr(sum(members[1:], start=members[0] * 1.0) - there == 0)
            if not t.scope:
                solver.addConstr(y[()] * 1.0 == 1)
            found += sum(
                (mine * float(t.array[entry]) for entry, mine in y.items() if np.isfinite(t.array[entry])),
                start=0.0 * next(iter(y.values())),
            )
        return found

    for load in loads:
        solver.addConstr(total(_unfolded(network, load.blocks)[0]) <= load.limit)
    solver.minimize(total(costs))
    status = solver.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return None
    assert status == highspy.HighsModelStatus.kOptimal, solver.modelStatusToString(status)
    return solver.getObjectiveValue()
