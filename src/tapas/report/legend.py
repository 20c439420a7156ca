"""The words of a plan's main table, explained: only those that stand in it."""

import re
from collections.abc import Iterator

from rich.text import Text

from tapas.plan.plan import Plan
from tapas.report.weights import Row, rows_of

_STORED = (("dim ", "dim 0 over {axis}: the devices along {axis} hold a piece of dim 0 each."),)
_WORK = (
    ("repeated", "repeated: every device does all of it."),
    ("result dim ", "result dim {dim}: that dim of what the operator computes, counted from 0."),
    ("partial sums", "partial sums: each device works on its share of a sum that is added up later."),
    ("what it sums up", "what it sums up: each device adds up a part, the parts are added up later."),
    (" /", "a / b: several operators read the weight, some split as a, some as b."),
)
_TRAFFIC = (
    ("gather", "gather: collect the pieces for use."),
    ("scatter grads", "scatter grads: add gradients up, each device keeps its piece."),
    ("add up grads", "add up grads: add them up, all keep the sum."),
    ("exchange pieces", "exchange pieces: from the dim it is stored split on to the one it is used split on."),
    ("slice", "slice, gather grads: each device uses a piece of a weight that all hold, and collects its gradient."),
)
_STATES = (
    "In JSON and --pin: S(d) split on dim d, R whole, B whole with gradients still to be added up, P value still "
    "to be added up; one for each axis."
)


def _found(rows: list[Row]) -> Iterator[str]:
    columns = ((_STORED, [r.stored for r in rows]), (_WORK, [r.work for r in rows]), (_TRAFFIC, _plain(rows)))
    for words, cells in columns:
        yield from (text for word, text in words if any(word in cell for cell in cells))


def _plain(rows: list[Row]) -> list[str]:
    """What is said of traffic, without the `gather` that is part of `slice, gather grads`."""
    return [row.traffic.replace("slice, gather grads", "slice") for row in rows]


def legend(plan: Plan) -> Text:
    rows = rows_of(plan)
    dim = re.search(r"result dim (\d+)", " ".join(row.work for row in rows))
    words = [text.format(axis=plan.mesh["names"][-1], dim=dim[1] if dim else "") for text in _found(rows)]
    words += ["= name: the same weight by another name."] if plan.tied else []
    return Text(" ".join([*words, _STATES]), "dim")
