"""Views: reshapes of all kinds, permutations, expand."""

from collections.abc import Sequence
from itertools import pairwise
from math import gcd, prod

from tapas.rules.base import Arguments, Call, Local, Rule, rule
from tapas.rules.notation import Term, broadcast, dims_of, from_labels, names, result_size, wrap

# ---------------------------------------------------------------------------------------------
# Reshapes: the factors are the common refinement of the two shapes


def refinement(before: Sequence[int], after: Sequence[int]) -> tuple[Term, Term, dict[str, int]]:
    """Labels for a reshape between two shapes, and the sizes of the labels.

    Seen from the last dim, a shape cuts the elements at the products of its last dims. Where the cuts of
    both shapes divide one another, the parts between them are the factors, major first. From the first
    cut that fits only one of them on, only what the leading dims have in common can be split.
    """
    if prod(before) == 0:
        return [["1"] for _ in before], [["1"] for _ in after], {}
    cuts = sorted({*_cuts(before), *_cuts(after)}, reverse=True)
    chain = [cuts[0]]
    for cut in cuts[1:]:
        if chain[-1] % cut or not all(_falls_between(shape, cut) for shape in (before, after)):
            chain.append(chain[-1] // gcd(*(_leading(shape, chain[-1]) for shape in (before, after))))
            break
        chain.append(cut)
    sizes = {f"f{i}": high // low for i, (high, low) in enumerate(pairwise(chain)) if high > low}
    terms = tuple(_labelled(shape, chain, sizes, side) for side, shape in (("x", before), ("y", after)))
    return terms[0], terms[1], sizes


def _cuts(shape: Sequence[int]) -> list[int]:
    return [prod(shape[i:]) for i in range(len(shape) + 1)]


def _falls_between(shape: Sequence[int], cut: int) -> bool:
    """Between two elements of a dim, rather than somewhere inside an element's own dims."""
    return cut % max(c for c in _cuts(shape) if c <= cut) == 0


def _leading(shape: Sequence[int], cut: int) -> int:
    """How many elements of a dim there are from a cut to the dim's end."""
    return cut // max(c for c in _cuts(shape) if c < cut)


def _labelled(shape: Sequence[int], chain: list[int], sizes: dict[str, int], side: str) -> Term:
    cuts, term = _cuts(shape), []
    for dim, (high, low) in enumerate(pairwise(cuts)):
        labels = [f"f{i}" for i, (top, bottom) in enumerate(pairwise(chain)) if low <= bottom < top <= high]
        rest = (high // low) // prod(sizes[label] for label in labels)
        if rest > 1:  # what lies beyond the common factors stays in one piece
            sizes[f"{side}{dim}"] = rest
            labels.append(f"!{side}{dim}")
        term.append(labels or ["1"])
    return term


def _as_reshape(local: Local) -> Arguments:
    return (local.call.args[0], local.result_shape()), ()


# A rank calls reshape: its shard may have other strides than the whole tensor, and a dim that is one
# element long on a rank must not be squeezed away.
@rule("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten._reshape_alias.default",
      "aten.flatten.using_ints", "aten.unflatten.int", "aten.squeeze.default", "aten.squeeze.dim",
      "aten.squeeze.dims", "aten.unsqueeze.default", "aten.ravel.default", "aten.view_copy.default",
      "aten.view_as.default", "aten.reshape_as.default")  # fmt: skip
def reshape(call: Call) -> Rule:
    """A second operand lends its shape, not its values: a rank is given the sizes instead."""
    before, after, sizes = refinement(call.operands[0].shape, call.results[0].shape)
    others: list[Term | None] = [None] * (len(call.operands) - 1)
    options = {"linear": ((0,),), "view": True, "target": "aten.reshape.default"}
    return from_labels([before, *others], [after], call, sizes, local=_as_reshape, **options)


# ---------------------------------------------------------------------------------------------
# Permutations


def permuted(call: Call, order: Sequence[int]) -> Rule:
    term = names(call.rank)
    return from_labels([term], [[term[d] for d in order]], call, linear=((0,),), view=True)


@rule("aten.permute.default")
def permute(call: Call) -> Rule:
    rank = call.rank
    return permuted(call, [wrap(d, rank) for d in call.arg(1, "dims")])


@rule("aten.transpose.int", "aten.swapaxes.default", "aten.swapdims.default")
def transpose(call: Call) -> Rule:
    rank = call.rank
    if not rank:
        return permuted(call, [])
    first, second = (wrap(call.arg(i, f"dim{i - 1}", call.arg(i, f"axis{i - 1}")), rank) for i in (1, 2))
    order = list(range(rank))
    order[first], order[second] = second, first
    return permuted(call, order)


@rule("aten.t.default", "aten.numpy_T.default", "aten.mT.default", "aten.adjoint.default")
def turned(call: Call) -> Rule:
    order = list(range(call.rank))
    if call.target.split(".")[1] == "numpy_T":
        return permuted(call, order[::-1])
    return permuted(call, [*order[:-2], *order[-2:][::-1]])


@rule("aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis.int", "aten.moveaxis.intlist")
def movedim(call: Call) -> Rule:
    rank = call.rank
    source, target = (dims_of(call.arg(i, name), rank) for i, name in ((1, "source"), (2, "destination")))
    order = [d for d in range(rank) if d not in source]
    for to, origin in sorted(zip(target, source, strict=True)):
        order.insert(to, origin)
    return permuted(call, order)


# ---------------------------------------------------------------------------------------------
# Expansion


def expanded(call: Call, **options) -> Rule:
    """A repeated dim is a factor of the result alone: each rank repeats its share of it."""
    whole = call.results[0].shape
    others: list[Term | None] = [None] * (len(call.operands) - 1)
    terms = [broadcast(call.operands[0].shape, whole), *others]
    return from_labels(terms, [names(len(whole))], call, linear=((0,),), view=True, **options)


@rule("aten.expand.default", "aten.broadcast_to.default", "aten.expand_copy.default")
def expand(call: Call) -> Rule:
    return expanded(call, local=result_size)


@rule("aten.expand_as.default")
def expand_as(call: Call) -> Rule:
    """The second operand lends its shape, not its values."""
    return expanded(
        call, target="aten.expand.default", local=lambda local: ((local.call.args[0], local.result_shape()), ())
    )


@rule("aten.broadcast_tensors.default")
def broadcast_tensors(call: Call) -> Rule:
    whole = call.results[0].shape
    terms = [broadcast(t.shape, whole) for t in call.operands]
    return from_labels(terms, [names(len(whole))] * len(call.results), call, view=True)


@rule("aten.diagonal.default")
def diagonal(call: Call) -> Rule:
    shape = call.operands[0].shape
    first, second = (wrap(call.arg(i, f"dim{i - 1}", i - 2), len(shape)) for i in (2, 3))
    term = [["!" + labels[0]] if d in (first, second) else labels for d, labels in enumerate(names(len(shape)))]
    result = [labels for d, labels in enumerate(term) if d not in (first, second)]
    return from_labels([term], [[*result, ["!diagonal"]]], call, linear=((0,),), view=True)


@rule("aten.view_as_real.default", "aten.view_as_complex.default")
def complex_view(call: Call) -> Rule:
    shape = min(call.operands[0].shape, call.results[0].shape, key=len)
    terms = [
        [*names(len(shape)), *([["!pair"]] * (len(t.shape) - len(shape)))] for t in (*call.operands, *call.results)
    ]
    return from_labels([terms[0]], [terms[1]], call, linear=((0,),), view=True)
