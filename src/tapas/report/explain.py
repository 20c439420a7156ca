"""An explanation as a page: a table for each operator and weight, the cheapest alternative first."""

from rich.console import Group
from rich.text import Text

from tapas.plan.plan import Plan
from tapas.planner.explain import Alternative, ExplainedVariable, Explanation
from tapas.report import units
from tapas.report.frame import Cell, line, page, table
from tapas.report.traffic import label
from tapas.report.words import kind, split_text, steps
from tapas.rules.base import wording

KINDS = {"compute": "compute", "update": "optimizer update", "communication": "communication"}
SMALL = 1e-7  # seconds: not worth a word


def _why(plan: Plan, other: Alternative) -> str:
    changes = {k: s for k, s in other.seconds.items() if abs(s) > SMALL}
    words = [f"{KINDS[k]} {units.signed(s, units.seconds(s))}" for k, s in sorted(changes.items(), key=lambda c: -c[1])]
    text = ", ".join(words) or "no difference"
    if other.move is not None and other.move_seconds > SMALL:
        ways = [f"{sent} {way}" for way in ("forward", "backward") if (sent := steps(other.move, way))]
        text += f"; most of it to send {label(plan, other.move)} ({', '.join(ways)})"
    return text


def _row(plan: Plan, other: Alternative) -> tuple[Cell, ...]:
    assert other.cost is not None
    more = other.cost - plan.cost
    extra = f"{units.signed(more, units.seconds(more))} ({more / plan.cost:+.2%})" if abs(more) > SMALL else "as fast"
    does = other.does if other.does != "whole" else "nothing"
    return (does, other.axis, units.seconds(other.cost), extra, _why(plan, other))


def _table(explanation: Explanation, subject: ExplainedVariable) -> Group:
    axes = explanation.plan.mesh["names"]
    is_weight = subject.kind == "weight"
    chosen = [c if c != "whole" else "" for c in subject.chosen]
    what = split_text(chosen, axes, "stored whole" if is_weight else "done in full on every device").replace("\n", ", ")
    times = f" × {subject.copies}" if subject.copies > 1 else ""
    name = f"{subject.name}{times}, {'weight' if is_weight else kind(subject.kind)} {units.shape(subject.shape)}"
    title = f"{name}\nchosen: {what}"
    columns = ("!instead, split on", "!over", ">step time", ">more", "why")
    rows = [_row(explanation.plan, a) for a in subject.alternatives if a.cost is not None]
    return Group(table(title, columns, rows), *_with_and_without(explanation.plan, subject), *_hopeless(subject))


def _with_and_without(plan: Plan, subject: ExplainedVariable) -> list[Text]:
    """What is a way of its own to do the work (tokens sent to experts, a ring): the best that it comes to, over any
    axis, and the best without it."""
    found: list[Text] = []
    known = [(a, a.cost) for a in subject.alternatives if a.cost is not None]
    for words in wording(subject.kind).joint.values():
        stem = words.removesuffix(")")
        there = [n for n, does in zip(plan.mesh["names"], subject.chosen, strict=True) if does.startswith(stem)]
        used = [cost for a, cost in known if a.does.startswith(stem)]
        left = [cost for a, cost in known if a.axis in there and not a.does.startswith(stem)]
        used, left = ([plan.cost], left) if there else (used, [plan.cost])
        if used and left:
            both = f"{units.seconds(min(used))} a step at best, {units.seconds(min(left))} without."
            found.append(line((words[0].upper() + words[1:], "bold"), f": {both}"))
    return found


def _hopeless(subject: ExplainedVariable) -> list[Text]:
    """What needs no row: it was ruled out before the search."""
    names = [f"{a.does} over {a.axis}" for a in subject.alternatives if a.cost is None]
    reason = "Never better (another choice does the same for less), or not possible: "
    return [line((reason + ", ".join(names), "dim"))] if names else []


def _many(matched: int) -> str:
    return f"{matched} operators and weights" if matched != 1 else "1 operator or weight"


def explain_page(explanation: Explanation) -> Group:
    plan, shown = explanation.plan, len(explanation.subjects)
    left = explanation.matched - shown
    return page(
        (
            line((explanation.pattern, "bold"), f" matches {_many(explanation.matched)} of {plan.model}",
                 f"; the {shown} most expensive are shown" if left > 0 else ""),
            line("Step time of the plan ", (units.seconds(plan.cost), "bold green"),
                 ". Each alternative is forced on one axis and all else is chosen anew, as well as can be."),
            *(_table(explanation, s) for s in explanation.subjects),
        )
    )  # fmt: skip
