"""Pieces of a dim and dims from pieces: slice, split, select, cat, stack.

A slice, or a result of a split, holds a section of the dim: `At(start, stop)`. The bounds become cuts of
the tiling, so that each section is split by itself and a rank finds its share of all of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from tapas.ir.graph import refs
from tapas.rules.base import Arguments, At, Call, Factor, Local, Rule, rule
from tapas.rules.notation import Term, blocked, from_labels, names, within, wrap

# Gradients of a slice and of all slices: passes at the rate of strided copies, as measured on an H200.
INTO_ZEROS, SIDE_BY_SIDE = 1.7, 0.43


def sectioned(
    call: Call, dim: int, operands: Sequence[tuple[int, int]], results: Sequence[tuple[int, int]], **options
) -> Rule:
    """Tensors of equal shape but for `dim`, where each holds the section start:stop of a whole dim."""
    term = names(call.rank)
    free: Term = [*term[:dim], ["1"], *term[dim + 1 :]]
    rule = from_labels(
        [free] * len(operands), [free] * len(results), call, linear=(tuple(range(len(call.operands))),), **options
    )
    size = max(stop for _, stop in (*operands, *results))
    # an operand without elements along the dim has no part in its sections: it is whole, and nothing comes of it
    taken = tuple(At(dim, start=start, stop=stop) if start < stop else None for start, stop in operands)
    given = tuple(At(dim, start=start, stop=stop) for start, stop in results)
    return replace(rule, factors=(*rule.factors, Factor("sections", size, taken, given)))


# ---------------------------------------------------------------------------------------------
# One section


def _bounds(size: int, start: int | None, stop: int | None) -> tuple[int, int]:
    first, last, _ = slice(start, stop).indices(size)
    return first, max(first, last)


@rule("aten.slice.Tensor")
def slice_tensor(call: Call) -> Rule:
    dim, size, step = _slice_of(call)
    first, last = _bounds(size, call.arg(2, "start"), call.arg(3, "end"))
    if step == 1:
        return _section(call, dim, first, last)
    term = names(call.rank)
    count = call.results[0].shape[dim]
    if size % step or count != size // step:
        return from_labels(
            [blocked(term, (dim,))], [[*term[:dim], ["!part"], *term[dim + 1 :]]], call, linear=((0,),), view=True
        )
    strided: Term = [*term[:dim], [f"d{dim}", "!step"], *term[dim + 1 :]]  # one of every `step` elements
    return from_labels(
        [strided], [term], call, {"step": step, f"d{dim}": count}, linear=((0,),), view=True, local=_local_stride
    )


def _slice_of(call: Call) -> tuple[int, int, int]:
    dim = wrap(call.arg(1, "dim", 0), call.rank)
    return dim, call.operands[0].shape[dim], call.arg(4, "step", 1)


def _section(call: Call, dim: int, first: int, last: int) -> Rule:
    """A rank takes what it holds of first:last."""

    def local_bounds(local: Local) -> Arguments:
        pieces = local.operand_pieces(0, dim)
        start = within(pieces, 0, first)
        return (local.call.args[0], dim, start, start + within(pieces, first, last), 1), ()

    size, options = call.operands[0].shape[dim], {"view": True, "local": local_bounds, "target": "aten.slice.Tensor"}
    if (first, last) == (0, size):
        term = names(call.rank)
        return from_labels([term], [term], call, linear=((0,),), **options)
    return sectioned(call, dim, [(0, size)], [(first, last)], scattered=INTO_ZEROS, **options)


def _local_stride(local: Local) -> Arguments:
    dim, size, step = _slice_of(local.call)
    first, _ = _bounds(size, local.call.arg(2, "start"), local.call.arg(3, "end"))
    return (local.call.args[0], dim, first, local.operand_shape(0)[dim], step), ()


@rule("aten.narrow.default")
def narrow(call: Call) -> Rule:
    dim = wrap(call.arg(1, "dim"), call.rank)
    first = wrap(call.arg(2, "start"), call.operands[0].shape[dim])
    return _section(call, dim, first, first + call.arg(3, "length"))


@rule("aten.select.int", "aten.unbind.int")
def select(call: Call) -> Rule:
    dim = wrap(call.arg(1, "dim", 0), call.rank)
    term = names(call.rank)
    results = [[*term[:dim], *term[dim + 1 :]] for _ in call.results]
    return from_labels([blocked(term, (dim,))], results, call, linear=((0,),), view=True)


@rule("aten.slice_scatter.default")
def slice_scatter(call: Call) -> Rule:
    """A tensor with one section, or one of every `step` elements, replaced by another tensor."""
    rank = call.rank
    dim, size = wrap(call.arg(2, "dim", 0), rank), call.results[0].shape[wrap(call.arg(2, "dim", 0), rank)]
    first, last = _bounds(size, call.arg(3, "start"), call.arg(4, "end"))
    if (step := call.arg(5, "step", 1)) != 1:
        count = call.operands[1].shape[dim]
        term, even = names(rank), size == count * step
        whole, part = ([f"d{dim}", "!step"], [f"d{dim}"]) if even else (["!whole"], ["!part"])
        terms = [[*term[:dim], labels, *term[dim + 1 :]] for labels in (whole, part)]
        options = {"linear": ((0, 1),), "local": (lambda local: _every(local, dim, first, step)) if even else None}
        return from_labels(terms, [terms[0]], call, {"step": step, f"d{dim}": count} if even else {}, **options)

    def local_bounds(local: Local) -> Arguments:
        start = within(local.operand_pieces(0, dim), 0, first)
        return (*call.args[:2], dim, start, start + local.operand_shape(1)[dim], 1), ()

    return sectioned(call, dim, [(0, size), (first, last)], [(0, size)], local=local_bounds)


def _every(local: Local, dim: int, first: int, step: int) -> Arguments:
    return (*local.call.args[:2], dim, first, local.operand_shape(0)[dim], step), ()


@rule("aten.select_scatter.default")
def select_scatter(call: Call) -> Rule:
    dim = wrap(call.arg(2, "dim"), call.rank)
    term = blocked(names(call.rank), (dim,))
    return from_labels([term, [*term[:dim], *term[dim + 1 :]]], [term], call, linear=((0, 1),))


# ---------------------------------------------------------------------------------------------
# All sections


@rule("aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default", "aten.chunk.default",
      "aten.tensor_split.sections", "aten.tensor_split.indices", "aten.unsafe_split.Tensor",
      "aten.unsafe_split_with_sizes.default", "aten.unsafe_chunk.default",
      "aten.split_with_sizes_copy.default")  # fmt: skip
def split(call: Call) -> Rule:
    """A rank is told the sizes of its sections: uneven or empty ones fit no single number."""
    dim = wrap(call.arg(2, "dim", 0), call.rank)
    edges = [0]
    for result in call.results:
        edges.append(edges[-1] + result.shape[dim])
    sections = list(pairwise(edges))
    return sectioned(
        call, dim, [(0, edges[-1])], sections, view=True, scattered=SIDE_BY_SIDE,
        target="aten.split_with_sizes.default", local=lambda local: _local_sizes(local, dim),
    )  # fmt: skip


def _local_sizes(local: Local, dim: int) -> Arguments:
    sizes = tuple(local.result_shape(i)[dim] for i in range(len(local.call.results)))
    return (local.call.args[0], sizes, dim), ()


@rule("aten.cat.default", "aten.concat.default", "aten.concatenate.default")
def cat(call: Call) -> Rule:
    listed = refs(call.args[0])
    if sorted(listed) != list(range(len(call.operands))):
        return _cat_of_same(call)
    dim = wrap(call.arg(1, "dim", 0), len(call.results[0].shape))
    if any(len(t.shape) != len(call.results[0].shape) for t in call.operands):
        return Rule()  # the old exception: an empty vector beside tensors of any rank
    sections, offset = [], 0
    for tensor in (call.operands[i] for i in listed):
        sections.append((offset, offset + tensor.shape[dim]))
        offset += tensor.shape[dim]
    by_operand = [sections[listed.index(i)] for i in range(len(call.operands))]
    # gradients are parts of the result's: nothing runs
    return sectioned(call, dim, by_operand, [(0, offset)], family="concatenation", backward=0.0)


def _cat_of_same(call: Call) -> Rule:
    """One operand stands in several places: its dim cannot be told apart, the others can."""
    dim = wrap(call.arg(1, "dim", 0), len(call.results[0].shape))
    term = names(call.rank)
    operands = [[*term[:dim], [f"!s{i}"], *term[dim + 1 :]] for i in range(len(call.operands))]
    return from_labels(
        operands, [[*term[:dim], ["!whole"], *term[dim + 1 :]]], call, linear=(tuple(range(len(operands))),)
    )


@rule("aten.stack.default")
def stack(call: Call) -> Rule:
    dim = wrap(call.arg(1, "dim", 0), len(call.results[0].shape))
    term = names(call.rank)
    result = [*term[:dim], ["!stacked"], *term[dim:]]
    return from_labels([term] * len(call.operands), [result], call, linear=(tuple(range(len(call.operands))),))


@rule("aten.meshgrid.indexing", "aten.meshgrid.default")
def meshgrid(call: Call) -> Rule:
    """Each vector is one factor, repeated along the others."""
    turned = call.arg(1, "indexing", "ij") == "xy" and len(call.operands) > 1
    terms = [[[f"d{i}"] if t.shape else ["1"]] if t.shape else [] for i, t in enumerate(call.operands)]
    whole = [[f"d{i}"] for i in range(len(call.operands))]
    if turned:
        whole = [whole[1], whole[0], *whole[2:]]
    return from_labels(terms, [whole] * len(call.results), call, view=True)
