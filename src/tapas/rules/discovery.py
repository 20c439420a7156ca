"""How an operator can be split, found by trying: it is run whole and in parts, and what the parts give is compared.

A factor is a dim of some operands that may be cut, at any place and whatever its size, such that each result is cut
likewise or is the sum of what the parts give, and so are the gradients. What is not the same every time is not found:
random operators, those with a state, those that write to what they read. Sizes among the constants of a call stay what
they are: what would need others for its parts is not found either.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product
from math import gcd, prod
from string import ascii_lowercase
from typing import Any

import torch

from tapas.ir.interpreter import resolve
from tapas.rules.base import Call
from tapas.rules.trials import KINDS, FactorDims, Shapes, TriedCall, Unlike, WholeRun, compare, parts_of, place, same

MOST_PLACEMENTS = 3000  # of a factor in the operands of a call
MOST_ELEMENTS = 2_000_000  # of the operands of a call that is tried


class Discovery:
    """The factors of one call."""

    def __init__(self, call: Call) -> None:
        self.call, self.actual = call, tuple(t.shape for t in call.operands)
        self.constants = set(_numbers((call.args, call.kwargs)))
        self.trial, self.shapes = self._small()

    def _small(self) -> tuple[TriedCall, Shapes]:
        """Small operands that it takes, in double precision if it can."""
        function = resolve(self.call.target)
        own = tuple(t.dtype for t in self.call.operands)
        wide = tuple({"complex64": "complex128"}.get(d, "float64") if _floating(d) else d for d in own)
        for dtypes in dict.fromkeys((wide, own)):
            near = tuple(sorted(c for c in self.constants if abs(c) < 1000))
            trial = TriedCall(self.call, function, dtypes, near)
            for shapes in dict.fromkeys(self._shrunk()):
                if sum(map(prod, shapes)) <= MOST_ELEMENTS and self._steady(trial, shapes):
                    return trial, shapes
        raise Unlike("no small operands that it takes")

    def _steady(self, trial: TriedCall, shapes: Shapes) -> bool:
        for kind in ("normal", "positive"):
            first, again = trial.whole(shapes, kind, 0), trial.whole(shapes, kind, 0)
            if first is None or again is None:
                continue
            pairs = zip([*first.results, *first.gradients], [*again.results, *again.gradients], strict=True)
            if not all(same(x, y) for x, y in pairs if x is not None and y is not None):
                raise Unlike("it does not give the same twice")
            return True
        return False

    def _shrunk(self) -> Iterator[Shapes]:
        """The shapes with other numbers for those that are large and no constant of the call."""
        sizes = list(dict.fromkeys(size for shape in self.actual for size in shape))
        large = [size for size in sizes if size > 12 and size not in self.constants]
        taken = {*sizes, *self.constants}
        free = (n for n in (6, 8, 10, 9, 12, 14, 15, 16, 18, 20, 21, 22, 24, 25) if n not in taken)
        renamed = dict(zip(large, free, strict=False))
        if len(renamed) == len(large):
            yield _renamed(self.actual, renamed)
        common = gcd(*large)
        for unit in (common, common // 2, common // 4):
            if unit > 1 and common % unit == 0:
                yield _renamed(self.actual, {size: size // unit for size in large})
        yield self.actual

    # -- placements ----------------------------------------------------------------------------------------

    def _placements(self) -> Iterator[tuple[int | None, ...]]:
        """The dims of the operands that one factor may be: of one size."""
        sizes = {size for shape in self.shapes for size in shape if size > 1}
        found = 0
        for wanted in sorted(sizes):
            places = [[None, *(d for d, size in enumerate(shape) if size == wanted)] for shape in self.shapes]
            for placed in product(*places):
                if any(dim is not None for dim in placed):
                    found += 1
                    if found > MOST_PLACEMENTS:
                        return
                    yield placed

    def _resized(self, placed: Sequence[int | None], size: int) -> Shapes:
        return tuple(
            shape if dim is None else (*shape[:dim], size, *shape[dim + 1 :])
            for shape, dim in zip(self.shapes, placed, strict=True)
        )

    def _sizes(self, placed: Sequence[int | None]) -> list[int]:
        """What the dim is tried with: small numbers of all kinds, and as large as it is in the call."""
        taken = {size for i, shape in enumerate(self.shapes) for d, size in enumerate(shape) if d != placed[i]}
        sizes = [7, 11, 5, 13, 16, 26]
        sizes.sort(key=lambda n: n in taken | self.constants)  # one that nothing else has tells more
        row = sum(prod(s) for s, d in zip(self._resized(placed, 1), placed, strict=True) if d is not None)
        large = min(_size(self.actual, placed), max(26, MOST_ELEMENTS // row))
        return list(dict.fromkeys((_size(self.shapes, placed), *sizes[:4], large)))

    def factor(self, placed: tuple[int | None, ...]) -> FactorDims | None:
        """The factor of such dims; None if there is none."""
        results: tuple[int | None, ...] | None = None
        told = [False] * len(self.call.results)  # whether a result was ever anything but zero
        tried: set[int] = set()
        for number, size in enumerate(self._sizes(placed)):
            shapes = self._resized(placed, size)
            for kind in KINDS if number == 0 else KINDS[:2] if number < 3 else KINDS[:1]:
                whole = self.trial.whole(shapes, kind, number)
                if whole is None:
                    continue
                if results is None:
                    results = self._cut_results(whole, placed, size)
                if any(d is not None and r.shape[d] != size for r, d in zip(whole.results, results, strict=True)):
                    return None
                for sizes in parts_of(size, None in results) if number < 3 else parts_of(size)[:1]:
                    compare(self.trial, whole, [FactorDims(placed, results)], [sizes])
                told = [t or bool(r.any()) for t, r in zip(told, whole.results, strict=True)]
                tried.add(size)
        if results is None or len(tried) < 3:
            return None
        if not all(told):  # it may be about numbers that are not finite
            whole = self.trial.whole(self.shapes, "odd", 0)
            if whole is None or not all(t or bool(r.any()) for t, r in zip(told, whole.results, strict=True)):
                return None
            compare(self.trial, whole, [FactorDims(placed, results)], parts_of(_size(self.shapes, placed))[:1])
        sums_truth = any(d is None and t.dtype == "bool" for d, t in zip(results, self.call.results, strict=True))
        return None if sums_truth else FactorDims(placed, results)

    def _cut_results(self, whole: WholeRun, placed: Sequence[int | None], size: int) -> tuple[int | None, ...]:
        """The dims of the results that are cut with the operands'."""
        at = [place(x, [dim], [slice(0, size - 1)]) for x, dim in zip(whole.operands, placed, strict=True)]
        try:
            results, _ = self.trial.run([x[cut] for x, cut in zip(whole.operands, at, strict=True)])
        except Exception as error:
            raise Unlike(str(error)) from None
        found: list[int | None] = []
        for part, entire in zip(results, whole.results, strict=True):
            if part.dim() != entire.dim():
                raise Unlike("other shapes")
            other = [d for d, (n, m) in enumerate(zip(part.shape, entire.shape, strict=True)) if n != m]
            if len(other) > 1 or any((part.shape[d], entire.shape[d]) != (size - 1, size) for d in other):
                raise Unlike("other shapes")
            found.append(other[0] if other else None)
        return tuple(found)

    def factors(self, skipped: Collection[int], tell: Callable[[int], None]) -> list[FactorDims]:
        """All of them; where two would cut the same dim, one of them. Placements are numbered, and told before they are
        tried: an operator may crash."""
        found: list[FactorDims] = []
        for number, placed in enumerate(self._placements()):
            if number in skipped:
                continue
            tell(number)
            try:
                factor = self.factor(placed)
            except Unlike:
                continue
            if factor is not None:
                found.append(factor)
        kept: list[FactorDims] = []
        for factor in sorted(found, key=FactorDims.rank):
            if not any(_meet(factor, other) for other in kept):
                kept.append(factor)
        return [f for f in kept if self._together(f, kept[: kept.index(f)])]

    def _together(self, factor: FactorDims, others: Sequence[FactorDims]) -> bool:
        """Whether it may be cut along with each of the others."""
        whole = self.trial.whole(self.shapes, "normal", 0) or self.trial.whole(self.shapes, "positive", 0)
        for other in others:
            pair = [factor, other]
            try:
                assert whole is not None
                compare(self.trial, whole, pair, [parts_of(_size(self.shapes, f.operands))[0] for f in pair])
            except Unlike:
                return False
        return True


def _floating(dtype: str) -> bool:
    kind: torch.dtype = getattr(torch, dtype)
    return kind.is_floating_point or kind.is_complex


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)


def _renamed(shapes: Shapes, sizes: dict[int, int]) -> Shapes:
    return tuple(tuple(sizes.get(size, size) for size in shape) for shape in shapes)


def _size(shapes: Shapes, placed: Sequence[int | None]) -> int:
    return next(shape[dim] for shape, dim in zip(shapes, placed, strict=True) if dim is not None)


def _meet(one: FactorDims, two: FactorDims) -> bool:
    pairs = zip((*one.operands, *one.results), (*two.operands, *two.results), strict=True)
    return any(a is not None and a == b for a, b in pairs)


def discover(call: Call, skipped: Collection[int] = (), tell: Callable[[int], None] = lambda number: None) -> str:
    """The factors as a pattern, such as `a b, b -> a b`; none: nothing was found."""
    try:
        factors = Discovery(call).factors(skipped, tell)
    except Unlike:
        return ""
    return pattern_of(call, factors)


def pattern_of(call: Call, factors: Sequence[FactorDims]) -> str:
    if not factors:
        return ""
    names = list(ascii_lowercase[: len(factors)])

    def term(rank: int, dims: Sequence[int | None]) -> str:
        labels = ["1"] * rank
        for name, dim in zip(names, dims, strict=True):
            if dim is not None:
                labels[dim] = name
        return " ".join(labels) if set(labels) - {"1"} else "_"

    operands = [term(len(t.shape), [f.operands[i] for f in factors]) for i, t in enumerate(call.operands)]
    results = [term(len(t.shape), [f.results[i] for f in factors]) for i, t in enumerate(call.results)]
    return f"{', '.join(operands)} -> {', '.join(results)}"
