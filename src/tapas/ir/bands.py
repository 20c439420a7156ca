"""Masks that let each position see those within a distance, told by the operators that make them.

What they make of positions is followed as formulas: numbers are affine in the indices of their tensor, truth values say
that some such numbers are not negative. What is not of this kind is not followed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tapas.ir.graph import Op, Ref

Form = tuple[int, ...]  # the factor of each index, and then what is added


@dataclass(frozen=True, slots=True)
class Formula:
    """A tensor of whole numbers, which are its one form; or of truth values: that all of its forms are 0 or more."""

    shape: tuple[int, ...]
    forms: tuple[Form, ...]
    truth: bool = False


class Band(NamedTuple):
    """A query sees so many keys before and after its own one."""

    before: int
    after: int


def bands(prelude: Iterable[Op]) -> dict[str, Band]:
    """Those among the tensors that are computed from constants, by name."""
    known: dict[str, Formula] = {}
    for op in prelude:
        follow = _FOLLOWED.get(op.target)
        given = [known.get(name) for name in op.operands]
        if follow is None or None in given or len(op.results) != 1:
            continue
        made = follow(op, [formula for formula in given if formula is not None])
        if made is not None:
            known[op.results[0]] = made
    found = {name: _band(formula) for name, formula in known.items() if formula.truth}
    return {name: band for name, band in found.items() if band is not None}


def _band(mask: Formula) -> Band | None:
    """The narrowest limits, if there is one on either side and a position sees itself."""
    if len(mask.shape) < 2 or mask.shape[-1] != mask.shape[-2]:
        return None
    before: list[int] = []
    after: list[int] = []
    for *others, query, key, added in mask.forms:
        if any(others) or (query, key) not in ((1, -1), (-1, 1)):
            return None
        (after if query > 0 else before).append(added)
    return Band(min(before), min(after)) if before and after and min(*before, *after) >= 0 else None


def _spread(formula: Formula, shape: Sequence[int]) -> Formula:
    """As part of a larger shape."""
    more = len(shape) - len(formula.shape)
    return Formula(tuple(shape), tuple((*[0] * more, *form) for form in formula.forms), formula.truth)


def _joined(given: Sequence[Formula]) -> list[Formula]:
    """In the shape that they have together. A dim of one element has the index 0, and so the factor 0."""
    rank = max(len(formula.shape) for formula in given)
    shapes = [(*[1] * (rank - len(formula.shape)), *formula.shape) for formula in given]
    return [_spread(formula, tuple(map(max, *shapes)) if len(shapes) > 1 else shapes[0]) for formula in given]


def _arange(op: Op, given: Sequence[Formula]) -> Formula | None:
    if len(op.args) != 1 or type(op.args[0]) is not int or dict(op.kwargs).get("dtype", "torch.int64") != "torch.int64":
        return None
    return Formula((op.args[0],), ((int(op.args[0] > 1), 0),))


def _full(op: Op, given: Sequence[Formula]) -> Formula | None:
    """Of all that is constant, only what is true everywhere is of use."""
    wanted = dict(op.kwargs).get("dtype") == "torch.bool" and bool(op.args[1])
    return Formula(tuple(op.args[0]), (), True) if wanted else None


def _unsqueeze(op: Op, given: Sequence[Formula]) -> Formula | None:
    (formula,), place = given, op.args[1]
    place += (len(formula.shape) + 1) * (place < 0)
    forms = tuple((*form[:place], 0, *form[place:]) for form in formula.forms)
    return Formula((*formula.shape[:place], 1, *formula.shape[place:]), forms, formula.truth)


def _expand(op: Op, given: Sequence[Formula]) -> Formula | None:
    (formula,), sizes = given, op.args[1]
    old = (*[1] * (len(sizes) - len(formula.shape)), *formula.shape)
    return _spread(formula, [had if size == -1 else size for size, had in zip(sizes, old, strict=True)])


def _added(sign: int) -> Callable[[Op, Sequence[Formula]], Formula | None]:
    def follow(op: Op, given: Sequence[Formula]) -> Formula | None:
        found = _numbers(op, given)
        if found is None or op.kwargs:
            return None
        shape, one, two = found
        return Formula(shape, (tuple(a + sign * b for a, b in zip(one, two, strict=True)),))

    return follow


def _compared(sign: int, more: int) -> Callable[[Op, Sequence[Formula]], Formula | None]:
    """That `sign` times the difference, less `more`, is not negative."""

    def follow(op: Op, given: Sequence[Formula]) -> Formula | None:
        found = _numbers(op, given)
        if found is None:
            return None
        shape, one, two = found
        form = [sign * (a - b) for a, b in zip(one, two, strict=True)]
        return Formula(shape, ((*form[:-1], form[-1] - more),), True)

    return follow


def _numbers(op: Op, given: Sequence[Formula]) -> tuple[tuple[int, ...], Form, Form] | None:
    """The shape of what two numbers make, and their forms there."""
    if len(op.args) != 2 or not isinstance(op.args[0], Ref) or any(formula.truth for formula in given):
        return None
    first, other = given[op.args[0].index], op.args[1]
    if isinstance(other, Ref):
        one, two = _joined((first, given[other.index]))
        return one.shape, one.forms[0], two.forms[0]
    if type(other) is not int:
        return None
    return first.shape, first.forms[0], (*[0] * len(first.shape), other)


def _both(op: Op, given: Sequence[Formula]) -> Formula | None:
    places = [a.index for a in op.args if isinstance(a, Ref)]
    if len(places) != 2 or len(op.args) != 2 or not all(f.truth for f in given):
        return None
    joined = _joined([given[place] for place in places])
    return Formula(joined[0].shape, tuple(form for formula in joined for form in formula.forms), True)


def _targets(names: str, follow: Callable[[Op, Sequence[Formula]], Any]) -> dict[str, Any]:
    return {f"aten.{name}": follow for name in names.split()}


_FOLLOWED: dict[str, Callable[[Op, Sequence[Formula]], Formula | None]] = {
    **_targets("arange.default", _arange), **_targets("full.default", _full),
    **_targets("unsqueeze.default", _unsqueeze), **_targets("expand.default", _expand),
    **_targets("add.Tensor", _added(1)), **_targets("sub.Tensor", _added(-1)),
    **_targets("gt.Tensor gt.Scalar", _compared(1, 1)), **_targets("ge.Tensor ge.Scalar", _compared(1, 0)),
    **_targets("lt.Tensor lt.Scalar", _compared(-1, 1)), **_targets("le.Tensor le.Scalar", _compared(-1, 0)),
    **_targets("__and__.Tensor logical_and.default bitwise_and.Tensor", _both),
}  # fmt: skip
