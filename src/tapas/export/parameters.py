"""How a plan stores the parameters, one by one."""

from collections.abc import Iterator
from dataclasses import dataclass

from tapas.plan.compare import places
from tapas.plan.plan import Plan
from tapas.sharding.layout import Layout, parse_state


@dataclass(frozen=True, slots=True)
class StoredParameter:
    name: str
    shape: tuple[int, ...]
    layout: Layout


def stored_parameters(plan: Plan) -> list[StoredParameter]:
    """All of them, by all their names, layer by layer."""
    found: dict[str, tuple[tuple[int, int, int], StoredParameter]] = {}
    first: dict[tuple[str, ...], int] = {}  # copies of a block -> where its parameters begin
    for number, (pattern, texts) in enumerate(plan.parameters.items()):
        layout, shape = tuple(map(parse_state, texts)), tuple(plan.shapes[pattern])
        here = list(places(plan, pattern))
        paths = tuple(path for path, _ in here)
        begin = first.setdefault(paths, number) if any(paths) else number
        for copy, (path, inner) in enumerate(here):
            found[path + inner] = (begin, copy, number), StoredParameter(path + inner, shape, layout)
    return [parameter for _, parameter in sorted(found.values(), key=lambda item: item[0])]


def tied_names(plan: Plan) -> dict[str, str]:
    """Parameters that are another one by a second name."""
    found: dict[str, str] = {}
    for second, first in plan.tied.items():
        for (path, inner), (home, name) in zip(places(plan, second), _at(plan, first, second), strict=False):
            found[path + inner] = home + name
    return found


def _at(plan: Plan, first: str, second: str) -> Iterator[tuple[str, str]]:
    """Where the first name is for each place of the second: one of them for all, or copy by copy."""
    here = list(places(plan, first))
    there = len(list(places(plan, second)))
    yield from here if len(here) == there else here[:1] * there


def work_note(plan: Plan) -> str:
    """How much of a plan lies in its operators, which files of parameters say nothing about."""
    split = sum(op.copies for op in plan.operators if any(c not in ("R", "B") for c in op.choice))
    total, moved = sum(op.copies for op in plan.operators), sum(move.copies for move in plan.moves)
    return (
        f"says how parameters are stored, not how work is split ({split} of {total} operators are) nor what is sent "
        f"between layers ({moved} moves): the tool derives both in its own way"
    )
