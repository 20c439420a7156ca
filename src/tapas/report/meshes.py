"""All meshes of a number of devices, ranked: above the plan for the best of them."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from tapas.plan.plan import Plan
from tapas.planner.mesh_ranking import RankedMesh
from tapas.report import units
from tapas.report.frame import line, page, table

NOTE = (
    "Ranked by the best plan that a quick search found for each; the first mesh was then searched in full, with proof."
)


def meshes_table(rows: Sequence[RankedMesh], plan: Plan) -> Table:
    """The best mesh as it was planned in the end, the others as they were found."""
    cells = []
    for number, row in enumerate(rows):
        memory = units.nbytes(row.nbytes) if row.nbytes else ""
        cost = plan.cost if number == 0 else row.cost
        if cost is None:
            cells.append((str(row.mesh), "–", "", memory, "", row.why))
            continue
        ratio = "" if number == 0 else units.slower(cost / plan.cost if plan.cost else 1.0)
        proof = plan.proof if number == 0 else "found"
        memory = units.nbytes(sum(plan.memory.values())) if number == 0 else memory
        cells.append((str(row.mesh), units.seconds(cost), ratio, memory, proof, _axes(row)))
    title = f"Meshes of {units.many(rows[0].mesh.devices, 'device')}, outermost axis first: {len(rows)} in all"
    columns = ("!mesh", ">step time", "!than the best", ">memory", "!proof", "what each axis splits")
    return table(title, columns, cells)


def _axes(row: RankedMesh) -> str:
    return " | ".join(row.axes)


def with_meshes(rows: Sequence[RankedMesh], plan: Plan, below: Group) -> Group:
    """The ranking, where there is one, above the plan."""
    return page((meshes_table(rows, plan), line(NOTE), below)) if rows else below
