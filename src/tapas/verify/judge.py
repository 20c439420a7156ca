"""How far the ranks are from the original, beside what rounding alone can do.

A gradient may be zero but for rounding: that of a key's bias before a softmax, or of a bias before a batch norm. What
is left of it is noise, and no two programs have the same. So where a difference is not small beside the tensor itself,
it is held against the spread of the original: how far that moves when every operator's result is off in its last bits,
and in float32 how far it is from the same in float64, since signs of what is nearly zero may turn in a later step. What
a program does wrong in both precisions shows in float64, which has no such excuse.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

import torch

from tapas.ir.graph import Graph
from tapas.runtime.parts import shard
from tapas.sharding.layout import Layout, R
from tapas.verify.steps import Outcome
from tapas.verify.trial import Coord, Placed

CAPTURE = "capture"  # the module itself against its graph, in the precision that it has
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, CAPTURE: 1e-4}
BUFFERS = "buffers after all steps"
MARGIN = 50.0  # times the spread: other programs add up in other orders, and more than once
SAMPLES = 3  # of the original when it is shaken


@dataclass(frozen=True)
class Error:
    """The worst of its kind."""

    what: str
    relative: float
    where: str = ""  # the output or weight, by its name in the model
    compared: int = 1


@dataclass(frozen=True)
class Item:
    """One tensor to compare."""

    what: str
    where: str
    layout: Layout
    take: Callable[[Outcome], torch.Tensor | None]  # the tensor, or a rank's part of it; None: there is none
    zero: bool = False  # no tensor is one of zeros


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


def distance(part: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference; inf where one is not finite and the other is not the same."""
    part, wanted = wide(part), wide(wanted)
    if part.shape != wanted.shape:
        return inf
    finite = torch.isfinite(wanted)
    if not bool(finite.all()):
        same = (part == wanted) | (torch.isnan(part) & torch.isnan(wanted))
        if not bool(same[~finite].all()):
            return inf
        part, wanted = part[finite], wanted[finite]
    error = float((part - wanted).norm()) if wanted.numel() else 0.0
    return error if isfinite(error) else inf


def size(x: torch.Tensor) -> float:
    """The norm of what is finite: masks hold -inf."""
    x = wide(x)
    return float(x[torch.isfinite(x)].norm())


def scale(reference: torch.Tensor, shaken: Sequence[torch.Tensor], tolerance: float) -> float:
    """What a difference is held against: a tensor's own size, or what its rounding comes to."""
    spread = max((distance(x, reference) for x in shaken), default=0.0)
    return max(size(reference), MARGIN * spread / tolerance, _smallest(reference.dtype))


def _smallest(dtype: torch.dtype) -> float:
    """Below that, last bits are lost."""
    known = torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else torch.finfo(torch.float64)
    return known.tiny / known.eps


def judge(
    graph: Graph, placed: Placed, reference: Outcome, ranks: Mapping[Coord, Outcome], tolerance: float,
    shake: Callable[[int], Outcome], finer: Outcome | None = None,
) -> list[Error]:  # fmt: skip
    """`shake`: the original once more, off by what rounding does; asked for only where something differs. `finer`: the
    original in a higher precision."""
    errors = _errors(graph, placed, reference, ranks, tolerance, ())
    if any(error.relative > tolerance for error in errors):
        moved = [*map(shake, range(SAMPLES)), *([finer] if finer is not None else [])]
        errors = _errors(graph, placed, reference, ranks, tolerance, moved)
    return errors


def _errors(
    graph: Graph, placed: Placed, reference: Outcome, ranks: Mapping[Coord, Outcome], tolerance: float,
    shaken: Sequence[Outcome],
) -> list[Error]:  # fmt: skip
    by_kind: dict[str, list[tuple[float, str]]] = {}
    for item in _items(graph, placed, reference):
        error = _relative(item, placed.mesh, reference, ranks, tolerance, shaken)
        by_kind.setdefault(item.what, []).append((error, item.where))
    return [Error(what, *max(found), len(found)) for what, found in by_kind.items()]


def _relative(
    item: Item, mesh: tuple[int, ...], reference: Outcome, ranks: Mapping[Coord, Outcome], tolerance: float,
    shaken: Sequence[Outcome],
) -> float:  # fmt: skip
    """The worst rank's difference."""
    whole = item.take(reference)
    if whole is None:  # then one is zeros, of which only the ranks know the shape
        return max(0.0 if (part := item.take(o)) is None else size(part) for o in ranks.values())
    worst = 0.0
    for coord, outcome in ranks.items():
        wanted, part = shard(whole, item.layout, mesh, coord), item.take(outcome)
        if part is None and not item.zero:
            return inf
        worst = max(worst, distance(torch.zeros_like(wanted) if part is None else part, wanted))
    others = [x if (x := item.take(outcome)) is not None else torch.zeros_like(whole) for outcome in shaken]
    return worst / scale(whole, others, tolerance)


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _items(graph: Graph, placed: Placed, reference: Outcome) -> Iterator[Item]:
    everywhere = (R,) * len(placed.mesh)
    for i, (name, layout) in enumerate(zip(graph.returned, placed.outputs, strict=False)):
        yield Item("outputs", name, layout, lambda o, i=i: o.outputs[i])
    for step in range(len(reference.losses)):
        yield Item("losses of all steps", f"step {step}", everywhere, lambda o, i=step: _number(o.losses[i]))
    if reference.gradients or reference.weights:
        for leaf in graph.trained():
            where, layout = leaf.paths[0], placed.weights[leaf.tensor]
            yield Item("gradients", where, layout, lambda o, n=leaf.tensor: o.gradients.get(n), zero=True)
            if reference.projected:
                what = "gradients through all outputs"
                yield Item(what, where, layout, lambda o, n=leaf.tensor: o.projected.get(n), zero=True)
            yield Item("weights after all steps", where, layout, lambda o, n=leaf.tensor: o.weights.get(n))
    for buffer, _ in graph.writes:
        where = graph.leaf_of[buffer].paths[0]
        yield Item(BUFFERS, where, everywhere, lambda o, n=buffer: o.buffers.get(n))
