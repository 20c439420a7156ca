"""The results of the zoo in numbers, and as a page: all types, with the reasons of those that are not verified."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tapas.util import VERSION
from tapas.verify.zoo import MESH, OUTCOMES, ZooRow

PLANNED = ("verified", "differs", "planned")
MOST = 0.9  # of the parameters' bytes
NAMED = 3  # places that have one reason


def shares(rows: Iterable[ZooRow]) -> dict[str, Any]:
    """How many of those that run here were planned and verified, and what tensor parallelism splits of them."""
    running = [row for row in rows if row.outcome != "unbuilt"]
    planned = [row for row in running if row.outcome in PLANNED]
    verified = [row for row in running if row.outcome == "verified"]
    measured = [row for row in planned if row.tensor_share is not None]
    compared = [row for row in planned if row.library_cost is not None and row.cost is not None]
    return {
        "run": len(running), "planned": len(planned), "verified": len(verified), "measured": len(measured),
        "split": sum((row.tensor_share or 0) >= MOST for row in measured), "compared": len(compared),
        "cheaper": sum((row.cost or 0) <= (row.library_cost or 0) * (1 + 1e-9) for row in compared),
    }  # fmt: skip


def zoo_text(rows: Iterable[ZooRow], known: Collection[str] = ()) -> str:
    """The page; `known` are the types that there are."""
    rows = sorted(rows, key=lambda row: row.type)
    lines = [*_introduction(rows, known), ""]
    for outcome, meaning in OUTCOMES.items():
        those = [row for row in rows if row.outcome == outcome]
        if those:
            lines += [f"## {outcome}: {len(those)}", "", f"{meaning[0].upper()}{meaning[1:]}.", ""]
            lines += _verified(those) if outcome == "verified" else _reasons(those)
    left = sorted(set(known) - {row.type for row in rows})
    if left:
        lines += [f"## not examined: {len(left)}", "", ", ".join(left), ""]
    return "\n".join(lines)


def _introduction(rows: Sequence[ZooRow], known: Collection[str]) -> list[str]:
    found = shares(rows)
    run = max(found["run"], 1)
    lines = [
        "# The zoo", "",
        f"Written by `tapas zoo --page` of TAPAS {VERSION}{_libraries()}: model types of transformers, each with a "
        "small configuration and made-up inputs (a training step where the class computes a loss), planned on a mesh "
        f"of {MESH} and verified on ranks that are threads.", "",
    ]  # fmt: skip
    if known:
        lines += [f"Examined: {len(rows)} of {len(known)} types.", ""]
    lines += [
        f"Of {found['run']} types that run here, {found['planned']} are planned ({found['planned'] / run:.0%}) and "
        f"{found['verified']} verified ({found['verified'] / run:.0%}).", "",
    ]  # fmt: skip
    if found["measured"]:
        lines += [
            "With the batch whole (`--no-batch-split`), and operators that split as much of the parameters that they "
            f"read as any of their factors does, {found['split']} of {found['measured']} split the use of {MOST:.0%} "
            "of the bytes of their parameters or more; what is left whole is named.", "",
        ]  # fmt: skip
    if found["compared"]:
        lines += [
            f"{found['compared']} bring a plan of transformers' own (`base_model_tp_plan`) that can be followed: the "
            f"best one with the batch whole takes no longer than it does in {found['cheaper']} cases.", "",
        ]  # fmt: skip
    return lines[:-1]


def _libraries() -> str:
    import torch

    from tapas.models.hub import library

    return f" (torch {torch.__version__}, transformers {library().__version__})"


def _verified(rows: Sequence[ZooRow]) -> list[str]:
    lines = [
        "| type | class | parameters | split | transformers' plan | left whole, stays whole |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = "" if row.tensor_share is None else f"{row.tensor_share:.0%}"
        theirs = f"{row.library_cost / row.cost:.2f}x" if row.library_cost and row.cost else ""
        left = merged([*row.whole, *(note for note in row.notes if "stays whole" in note)])
        lines.append(_line(row.type, row.model, f"{row.parameters:,}", share, theirs, "; ".join(left)))
    return [*lines, ""]


def merged(texts: Sequence[str]) -> list[str]:
    """Places that have one reason are told with it once.

    >>> merged(["a.0: too small", "b: odd", "a.1: too small", "c: too small", "d: too small"])
    ['a.*, c, d: too small', 'b: odd']
    """
    places: dict[str, dict[str, None]] = {}
    for text in texts:
        place, _, reason = text.partition(": ")
        places.setdefault(reason, {})[re.sub(r"(?<=\.)\d+(?=[. ]|$)", "*", place)] = None
    return [f"{_some(list(those))}: {reason}" for reason, those in places.items()]


def _some(places: Sequence[str]) -> str:
    more = len(places) - NAMED
    return ", ".join(places[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _reasons(rows: Sequence[ZooRow]) -> list[str]:
    lines = ["| type | class | reason |", "|---|---|---|"]
    return [*lines, *(_line(row.type, row.model, row.why) for row in rows), ""]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/').replace('<', '&lt;') for cell in cells)} |"
