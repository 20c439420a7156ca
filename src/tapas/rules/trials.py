"""One operator on made-up operands, whole and in parts, values and gradients: what discovery and its checks run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapas.ir.interpreter import arguments
from tapas.rules.base import Call

Shapes = tuple[tuple[int, ...], ...]
Run = tuple[list[Tensor], list[Tensor | None]]  # results, and gradients of the operands


class FactorDims(NamedTuple):
    """A factor: the dim that it is in each tensor, None where it is not there."""

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]

    def rank(self) -> tuple[int, int]:
        """Before others: that cuts more results, and fewer operands."""
        return sum(dim is None for dim in self.results), sum(dim is not None for dim in self.operands)


class Unlike(Exception):
    """The parts do not give what the whole gives, or cannot be computed at all."""


# -- values --------------------------------------------------------------------------------------------------


def _uniform(shape: Sequence[int], low: float, high: float) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) * (high - low) + low


_ODD = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0], dtype=torch.float64)
_REAL: dict[str, Callable[[Sequence[int]], Tensor]] = {
    "normal": lambda shape: torch.randn(shape, dtype=torch.float64),
    "positive": lambda shape: _uniform(shape, 0.05, 0.95),
    "ties": lambda shape: torch.randint(-2, 3, tuple(shape)).double(),  # and zeros
    "large": lambda shape: torch.randn(shape, dtype=torch.float64) * 300,
    "negative": lambda shape: _uniform(shape, -4, -0.1),
    "one large": lambda shape: _but_one(torch.randn(shape, dtype=torch.float64), 3000.0),
    "one positive": lambda shape: _but_one(_uniform(shape, -4, -0.1), 2.0),
    "one negative": lambda shape: _but_one(_uniform(shape, 0.05, 0.95), -2.0),
    "one zero": lambda shape: _but_one(_uniform(shape, 0.05, 0.95), 0.0),
    "odd": lambda shape: _ODD[torch.randint(0, 4, tuple(shape))],
}
KINDS = tuple(kind for kind in _REAL if kind != "odd")
_WHOLE = {"ties": (0, 2), "large": (-9, 40), "negative": (-9, 0)}  # ranges


def _but_one(x: Tensor, odd: float) -> Tensor:
    """With one element that is unlike the others: what is done if any is like that, or if all are, is then seen."""
    if x.numel():
        x.view(-1)[int(torch.randint(0, x.numel(), ()))] = odd
    return x


def _values(shape: Sequence[int], dtype: str, kind: str, most: int) -> Tensor:
    """Numbers of a kind; normal whole ones can be the index of a place along any dim."""
    wanted: torch.dtype = getattr(torch, dtype)
    if wanted == torch.bool:
        if kind.startswith("one"):
            most_are = kind in ("one negative", "one zero")
            return _but_one(torch.full(tuple(shape), most_are), not most_are)
        return torch.rand(tuple(shape)) < (0.9 if kind == "positive" else 0.5)
    if wanted.is_complex:
        return torch.complex(_REAL[kind](shape), _REAL[kind](shape)).to(wanted)
    if not wanted.is_floating_point:
        low, high = _WHOLE.get(kind, (int(kind == "positive"), most))
        whole = torch.randint(low, max(high, low + 1), tuple(shape)).to(wanted)
        return _but_one(whole.clamp(min=min(1, most - 1)), 0) if kind == "one zero" else whole
    return _REAL[kind](shape).to(wanted)


# -- one call --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TriedCall:
    """An operator with its constants, in a precision that it can be computed in."""

    call: Call
    function: Callable[..., Any]
    dtypes: tuple[str, ...]
    constants: tuple[float, ...]  # numbers among its arguments

    def operands(self, shapes: Shapes, kind: str, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        most = min((size for shape in shapes for size in shape if size > 1), default=2)
        made = [_values(shape, dtype, kind, most) for shape, dtype in zip(shapes, self.dtypes, strict=True)]
        if kind == "ties" and self.constants:  # what it compares with
            numbers = torch.tensor(self.constants, dtype=torch.float64)
            for x in (x for x in made if x.dtype != torch.bool and not x.is_complex()):
                drawn = numbers[torch.randint(0, len(numbers), tuple(x.shape))].to(x.dtype)
                x.copy_(torch.where(torch.rand(x.shape) < 0.3, drawn, x))
        return made

    def run(self, operands: Sequence[Tensor], seeds: Sequence[Tensor] | None = None) -> Run:
        """Results and gradients; the seeds are those of the results."""
        wanted = [t.differentiable for t in self.call.operands]
        given = [x.detach().clone().requires_grad_(w) for x, w in zip(operands, wanted, strict=True)]
        args, kwargs = arguments(self.call.args, self.call.kwargs, given)
        returned: Any = self.function(*args, **kwargs)
        results: list[Tensor] = [returned] if isinstance(returned, Tensor) else list(returned)
        if len(results) != len(self.call.results) or not all(isinstance(r, Tensor) for r in results):
            raise Unlike("other results")
        if any(not torch.equal(x, y) for x, y in zip(operands, given, strict=True) if not x.isnan().any()):
            raise Unlike("it writes to what it reads")
        gradients: list[Tensor | None] = [None] * len(given)
        if seeds is not None and any(wanted):
            pairs = [
                (r, s) for r, s, t in zip(results, seeds, self.call.results, strict=True)
                if t.differentiable and r.requires_grad
            ]  # fmt: skip
            if pairs:
                leaves = [x for x in given if x.requires_grad]
                made = torch.autograd.grad([r for r, _ in pairs], leaves, [s for _, s in pairs], allow_unused=True)
                filled = iter(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, made, strict=True))
                gradients = [next(filled) if w else None for w in wanted]
        return [r.detach() for r in results], gradients

    def whole(self, shapes: Shapes, kind: str, seed: int) -> "WholeRun | None":
        """None where the operator takes no such operands."""
        operands = self.operands(shapes, kind, seed)
        try:
            results, _ = self.run(operands)
            seeds = [_like(result) for result in results]
            return WholeRun(operands, seeds, *self.run(operands, seeds))
        except Unlike:
            raise
        except Exception:  # whatever an operator does not like about its operands
            return None


@dataclass(frozen=True)
class WholeRun:
    operands: list[Tensor]
    seeds: list[Tensor]  # gradients of the results
    results: list[Tensor]
    gradients: list[Tensor | None]


def _like(x: Tensor) -> Tensor:
    return torch.randn_like(x) if x.is_floating_point() or x.is_complex() else torch.zeros_like(x)


def same(found: Tensor, wanted: Tensor) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return torch.equal(found, wanted)
    near = 1e-8 if wanted.dtype in (torch.float64, torch.complex128) else 1e-4
    finite = wanted[wanted.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(found, wanted, rtol=near, atol=near * 1e-2 * max(scale, 1e-30), equal_nan=True)


# -- whole and in parts --------------------------------------------------------------------------------------------


def compare(trial: TriedCall, whole: WholeRun, factors: Sequence[FactorDims], parts: Sequence[Sequence[int]]) -> None:
    """Cut along one factor, or along several at once: raises if that is not what the whole gives."""
    cuts = [[slice(end - n, end) for n, end in zip(sizes, accumulate(sizes), strict=True)] for sizes in parts]
    results = [torch.zeros_like(r) for r in whole.results]
    gradients = [None if g is None else torch.zeros_like(g) for g in whole.gradients]
    for here in product(*cuts):
        ins = [place(x, [f.operands[i] for f in factors], here) for i, x in enumerate(whole.operands)]
        outs = [place(r, [f.results[i] for f in factors], here) for i, r in enumerate(whole.results)]
        try:
            made, back = trial.run(
                [x[at] for x, at in zip(whole.operands, ins, strict=True)],
                [s[at] for s, at in zip(whole.seeds, outs, strict=True)],
            )
        except Exception as error:  # as above
            raise Unlike(str(error)) from None
        for total, part, at in (*zip(results, made, outs, strict=True), *zip(gradients, back, ins, strict=True)):
            if total is None or part is None:
                continue
            if total[at].shape != part.shape or total.dtype != part.dtype:
                raise Unlike("other shapes")
            if part.dtype == torch.bool:
                total[at] |= part
            else:
                total[at] += part
    pairs = (*zip(results, whole.results, strict=True), *zip(gradients, whole.gradients, strict=True))
    if not all(same(mine, wanted) for mine, wanted in pairs if mine is not None and wanted is not None):
        raise Unlike("other values")


def place(x: Tensor, dims: Sequence[int | None], cuts: Sequence[slice]) -> tuple[slice, ...]:
    at = [slice(None)] * x.dim()
    for dim, cut in zip(dims, cuts, strict=True):
        if dim is not None:
            at[dim] = cut
    return tuple(at)


def parts_of(size: int, summed: bool = False) -> list[list[int]]:
    """Ways to cut a dim: as devices do it in two and in three, and one element off either end. The last devices may get
    nothing: where results are `summed` they call the operator all the same."""
    found: list[list[int]] = []
    for count in (2, 3):
        each = -(-size // count)
        found.append([min(each, size - start) for start in range(0, size, each)])
    found += [[1, size - 1], [size - 1, 1], *([[size, 0]] if summed else [])]
    return [sizes for sizes in found if len(sizes) > 1]
