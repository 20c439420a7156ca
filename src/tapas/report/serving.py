"""A plan for serving as a page: the first token, the others, what they need, and plain tensor parallelism beside it."""

from collections.abc import Iterator, Sequence
from math import prod

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tapas.plan.plan import Plan
from tapas.report import units
from tapas.report.frame import FitToWidth, line, page, table
from tapas.report.plan import allowed, warnings_text
from tapas.report.traffic import sent, sent_table
from tapas.report.weights import legend, weights_table
from tapas.report.words import mesh_text, split_text
from tapas.rules.base import wording
from tapas.serving.plans import PhaseFigures, ServingPlan

CACHE_DIMS = ("b", "h", "c")


def serving_page(plan: ServingPlan) -> Group:
    return page((
        header(plan), figures_table(plan), held(plan), degrees_table(plan) if plan.degrees else None,
        *phase("Prefill", plan.prefill), *phase("Decode", plan.decode), legend(plan.prefill),
    ))  # fmt: skip


def header(plan: ServingPlan) -> Group:
    first = plan.prefill
    devices, parameters = prod(first.mesh["sizes"]), units.count(first.graph.get("parameters", 0))
    return Group(
        line((first.model, "bold"), f": {parameters} parameters in {first.dtype}, serving {plan.workload}"),
        line(f"{devices} × {first.cluster['device']['name']} as a mesh of {mesh_text(first)}"),
    )


def figures_table(plan: ServingPlan) -> Group:
    """As devices compute, and as an eager program is launched."""
    eager = plan.eager
    columns = [("computed", plan.figures), *([("launched one by one (eager)", eager)] if eager else [])]
    rows = [
        ("first token after", *(units.seconds(f.first_token_seconds) for _, f in columns)),
        ("each further one", *(units.seconds(f.token_seconds) for _, f in columns)),
        ("tokens per second", *(rate(f, plan) for _, f in columns)),
        ("all of it", *(units.seconds(f.total(plan.workload)) for _, f in columns)),
    ]
    return Group(table("Time", ("!", *(f">{name}" for name, _ in columns)), rows), _proof(plan))


def rate(figures: PhaseFigures, plan: ServingPlan) -> str:
    return f"{figures.tokens_per_s(plan.workload):,.0f}"


def _proof(plan: ServingPlan) -> Text:
    """Both programs at their best, each for itself, are a bound for any two that share their weights."""
    gap = (plan.cost - plan.bound) / plan.cost if plan.cost else 0.0
    if gap < 1e-9:
        return line(
            ("Optimal", "bold green"), ": by this cost model no two programs over one set of weights are faster"
        )
    fact = f": no two programs over one set of weights take less than {units.seconds(plan.bound)}"
    return line((f"Within {gap:.2%} of the best possible", "bold yellow"), fact)


def held(plan: ServingPlan) -> Table:
    """What a device holds all the time, and what it needs at most."""
    limit, most = allowed(plan.prefill), plan.figures.nbytes
    rows = [("weights", units.nbytes(plan.weights), "")]
    rows += [
        ("cache" if number == 0 else "", units.nbytes(plan.cache) if number == 0 else "", f"{name}: {words}")
        for number, (name, words) in enumerate(cache_words(plan))
    ]
    fits = "fits" if most <= limit else "does NOT fit"
    rows.append(("when it needs most", units.nbytes(most), f"of {units.nbytes(limit)}: {fits}"))
    return table("Memory per device", ("!", ">bytes", "how it is split"), rows)


def cache_words(plan: ServingPlan) -> Iterator[tuple[str, str]]:
    """`model.layers.*.self_attn`, `heads over y`."""
    words = wording("tapas.write_cache.default").factors
    for name, layout in plan.cache_layouts.items():
        parts = [words[CACHE_DIMS[int(state[2:-1])]] if state.startswith("S(") else "" for state in layout]
        yield name, split_text(parts, plan.prefill.mesh["names"], "whole").replace("\n", ", ")


def degrees_table(plan: ServingPlan) -> Table:
    """The degrees of plain tensor parallelism, with the batch dealt out over the other devices."""
    devices, limit = prod(plan.prefill.mesh["sizes"]), allowed(plan.prefill)
    rows: list[Sequence[str | Text]] = [_figures_row(line(("this plan", "bold green")), plan.figures, plan, limit)]
    for degree, figures in plan.degrees.items():
        name = f"{degree}, {units.many(devices // degree, 'replica')}"
        if isinstance(figures, str):
            rows.append((name, "–", "–", "", "", f"not applicable: {figures}"))
        else:
            rows.append(_figures_row(name, figures, plan, limit))
    columns = ("!degree", ">first token", ">tokens/s", ">all of it", "!than this plan", "memory")
    return table("Compared with plain tensor parallelism, by the same cost model", columns, rows)


def _figures_row(name: str | Text, figures: PhaseFigures, plan: ServingPlan, limit: float) -> Sequence[str | Text]:
    total = figures.total(plan.workload)
    ratio = units.slower(total / plan.cost) if isinstance(name, str) else ""
    memory = units.nbytes(figures.nbytes) + ("" if figures.nbytes <= limit else " (does not fit)")
    return name, units.seconds(figures.first_token_seconds), rate(figures, plan), units.seconds(total), ratio, memory


def phase(title: str, plan: Plan) -> Iterator[RenderableType]:
    """How one of the programs splits its work, and what it sends."""
    graph, seconds = plan.graph, plan.seconds
    yield line(
        (f"{title}: ", "bold cyan"), f"{units.many(graph['operators'], 'operator')}, {units.seconds(plan.cost)}",
        f" = compute {units.seconds(seconds['compute'])} + communication {units.seconds(seconds['communication'])}",
    )  # fmt: skip
    yield FitToWidth(lambda width: weights_table(plan, width))
    if sent(plan):
        yield FitToWidth(lambda width: sent_table(plan, width))
    if (warnings := warnings_text(plan)) is not None:
        yield warnings
