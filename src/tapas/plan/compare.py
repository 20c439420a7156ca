"""Two plans side by side: what they cost, and where they differ.

Two plans of one model may group its layers differently (`model.layers.*` here, `model.layers.0` and
`model.layers.{1-31}` there), so they are compared copy by copy; what differs in the same way is then
put together again.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tapas.ir.patterns import container, pattern_of
from tapas.plan.plan import Operator, Plan


@dataclass(frozen=True)
class LayoutDifference:
    """A parameter that is stored in two ways; () where a plan has no such parameter."""

    name: str
    first: tuple[str, ...]
    second: tuple[str, ...]


@dataclass(frozen=True)
class OperatorDifference:
    name: str  # pattern of the module
    kind: str  # the operator
    first: Operator | None
    second: Operator | None


@dataclass(frozen=True)
class Comparison:
    first: Plan
    second: Plan
    parameters: tuple[LayoutDifference, ...]
    operators: tuple[OperatorDifference, ...]

    def to_dict(self) -> dict[str, Any]:
        def choice(op: Operator | None) -> list[str] | None:
            return list(op.choice) if op else None

        operators = [
            {"name": d.name, "kind": d.kind, "first": choice(d.first), "second": choice(d.second)}
            for d in self.operators
        ]
        parameters = [asdict(d) for d in self.parameters]
        return {
            "first": _figures(self.first), "second": _figures(self.second), "parameters": parameters,
            "operators": operators,
        }  # fmt: skip


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model, "mesh": plan.mesh, "cluster": plan.cluster["name"], "cost": plan.cost, "proof": plan.proof,
        "seconds": plan.seconds, "memory": plan.memory, "pins": list(plan.pins),
    }  # fmt: skip


Texts = tuple[str, ...]
Differing = tuple[str, Operator | None, Operator | None]  # path of a copy, and what it does in either plan


def compare(first: Plan, second: Plan) -> Comparison:
    names = _AlignedNames(first, second)
    one, two = _layouts(first), _layouts(second)
    stored: defaultdict[tuple[str, Texts, Texts], list[str]] = defaultdict(list)
    for key in dict.fromkeys((*one, *two)):
        a, b = one.get(key, ()), two.get(key, ())
        if _split(a, first) != _split(b, second) or not (a and b):
            stored[key[1], a, b].append(key[0])
    parameters = [LayoutDifference(names.joined(p, inner), a, b) for (inner, a, b), p in stored.items()]
    return Comparison(first, second, tuple(parameters), tuple(_operators(first, second, names)))


def _operators(first: Plan, second: Plan, names: "_AlignedNames") -> Iterator[OperatorDifference]:
    one, two = _choices(first), _choices(second)
    found: defaultdict[tuple[tuple[str, str, int], Texts | None, Texts | None], list[Differing]] = defaultdict(list)
    for key in dict.fromkeys((*one, *two)):
        a, b = one.get(key), two.get(key)
        if a is None or b is None or _split(a.choice, first) != _split(b.choice, second):
            found[key[1:], a and a.choice, b and b.choice].append((key[0], a, b))
    for ((inner, target, _), _, _), same in found.items():
        yield OperatorDifference(names.joined([path for path, _, _ in same], inner), target, *same[0][1:])


def _split(choice: tuple[str, ...], plan: Plan) -> dict[str, str]:
    """What is split, by axis: an axis that splits nothing may as well not be there."""
    return {axis: c for axis, c in zip(plan.mesh["names"], choice, strict=False) if c not in ("R", "B")}


Place = tuple[str, str]  # path of a copy ("" outside of any), name within it


def places(plan: Plan, pattern: str) -> Iterator[Place]:
    """Where a pattern occurs, copy by copy."""
    for block in plan.blocks:
        if block.paths and (pattern == block.name or pattern.startswith(block.name + ".")):
            yield from ((path, pattern[len(block.name) :]) for path in block.paths)
            return
    yield "", pattern


def _layouts(plan: Plan) -> dict[Place, tuple[str, ...]]:
    return {place: tuple(layout) for name, layout in plan.parameters.items() for place in places(plan, name)}


def _choices(plan: Plan) -> dict[tuple[str, str, str, int], Operator]:
    """Operators of a module have no names that two plans share: they are counted by kind."""
    found: dict[tuple[str, str, str, int], Operator] = {}
    seen: Counter[tuple[str, str, str]] = Counter()
    for op in plan.operators:
        for path, inner in places(plan, op.module or op.block):
            number = seen[path, inner, op.target]
            seen[path, inner, op.target] += 1
            found[path, inner, op.target, number] = op
    return found


class _AlignedNames:
    """Copies by pattern, as a plan names them."""

    def __init__(self, *plans: Plan) -> None:
        paths = {path for plan in plans for block in plan.blocks for path in block.paths}
        self.members = Counter(place[0] for path in paths if (place := container(path)))

    def joined(self, paths: list[str], inner: str) -> str:
        ordered = sorted(set(paths), key=lambda p: [int(n) for n in re.findall(r"\d+", p)])
        return pattern_of(ordered, dict(self.members)) + inner
