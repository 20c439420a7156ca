"""Two plans side by side as a page."""

from collections.abc import Callable, Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tapas.plan.compare import Comparison
from tapas.plan.plan import Operator, Plan
from tapas.plan.simulate import simulate
from tapas.report import units
from tapas.report.frame import Cell, line, page, table
from tapas.report.words import kind, mesh_text, storage, work

SHOWN = 20
SECONDS = {"forward": "forward", "backward": "backward", "update": "optimizer update",
           "communication": "communication", "hidden": "hidden communication"}  # fmt: skip


def _change(first: float, second: float, text: Callable[[float], str]) -> str:
    more = second - first
    return "same" if abs(more) <= 1e-4 * max(abs(first), abs(second)) else units.signed(more, text(more))


def _figures(comparison: Comparison) -> Iterable[tuple[Cell, ...]]:
    one, two = comparison.first, comparison.second
    ratio = two.cost / one.cost if one.cost else 1.0
    yield (line(("step time", "bold")), units.seconds(one.cost), units.seconds(two.cost), units.slower(ratio))
    steps = [simulate(plan) for plan in (one, two)]
    if steps[0] is not None and steps[1] is not None:
        times = [step.seconds for step in steps if step is not None]
        yield ("  simulated, with the host", *map(units.seconds, times), units.slower(times[1] / times[0]))
    for key, name in SECONDS.items():
        a, b = one.seconds.get(key, 0.0), two.seconds.get(key, 0.0)
        yield (f"  {name}", units.seconds(a), units.seconds(b), _change(a, b, units.seconds))
    yield ("-",)
    a, b = sum(one.memory.values()), sum(two.memory.values())
    yield (line(("memory per device", "bold")), units.nbytes(a), units.nbytes(b), _change(a, b, units.nbytes))
    for key in dict.fromkeys((*one.memory, *two.memory)):
        a, b = one.memory.get(key, 0), two.memory.get(key, 0)
        yield (f"  {key}", units.nbytes(a), units.nbytes(b), _change(a, b, units.nbytes))


def _limited(rows: list[tuple[Cell, ...]], what: str) -> list[tuple[Cell, ...]]:
    more = len(rows) - SHOWN
    return rows[:SHOWN] + ([(f"and {more} more {what}", "", "")] if more > 0 else [])


def _parameters(comparison: Comparison) -> Table | None:
    def words(plan: Plan, layout: tuple[str, ...]) -> str:
        return storage(layout, plan.mesh["names"]) if layout else "–"

    rows: list[tuple[Cell, ...]] = [
        (d.name, words(comparison.first, d.first), words(comparison.second, d.second)) for d in comparison.parameters
    ]
    return table("Weights stored otherwise", ("~weight", "A", "B"), _limited(rows, "weights")) if rows else None


def _operators(comparison: Comparison) -> Table | None:
    """Operators of a module that change in the same way share a row."""
    first, second = comparison.first.mesh["names"], comparison.second.mesh["names"]
    alike: dict[tuple[str, str, str], list[str]] = {}
    for d in comparison.operators:
        words = _work(d.first, first), _work(d.second, second)
        alike.setdefault((d.name, *words), []).append(d.kind)
    rows: list[tuple[Cell, ...]] = [
        (f"{name} ({kind(kinds[0])})" if len(kinds) == 1 else f"{name} ({len(kinds)} operators)", a, b)
        for (name, a, b), kinds in alike.items()
    ]
    return table("Work split otherwise", ("~operator", "A", "B"), _limited(rows, "operators")) if rows else None


def _work(op: Operator | None, axes: list[str]) -> str:
    return work(op, axes) if op is not None else "–"


def _pins(plan: Plan) -> str:
    return f" among those that {', '.join(plan.pins)} leave" if plan.pins else ""


def compare_page(comparison: Comparison, names: tuple[str, str]) -> Group:
    plans = (comparison.first, comparison.second)
    lines = [
        line(
            (f"{letter}  ", "bold"),
            f"{name}: {p.model} on {p.cluster['name']}, {mesh_text(p)}, ",
            "compiled, " if p.source.get("compile") else "",
            p.proof,
            _pins(p),
        )
        for letter, name, p in zip("AB", names, plans, strict=True)
    ]
    same = None
    if not comparison.parameters and not comparison.operators:
        same = line("Both plans split every weight and every operator alike")
    columns = ("!", ">A", ">B", "B against A")
    return page(
        (
            Text("\n").join(lines), table("Figures", columns, _figures(comparison)), _parameters(comparison),
            _operators(comparison), same,
        )
    )  # fmt: skip
