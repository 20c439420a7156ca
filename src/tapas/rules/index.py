"""Embeddings, reading and writing by index. Dims that are not indexed are shared; an indexed dim may be split, too:
each rank then serves the places it holds, so what is read is a partial sum."""

from typing import Any

from tapas.ir.graph import Ref
from tapas.rules.base import Call, Kernel, Rule, Wording, rule
from tapas.rules.notation import Term, aligned, from_labels, names, number, override, placed, wrap

INDEX: dict[str, Any] = {"family": "index", "backward": 1.0}


def _serving(*labels: str) -> dict[str, Kernel]:
    return {label: Kernel() for label in labels}


def _mark(call: Call) -> str:
    """Truth values cannot be partial sums."""
    return "!" if call.operands[0].dtype == "bool" else ""


@rule("aten.gather.default", "aten.take_along_dim.default")
def gather(call: Call) -> Rule:
    along = "take_along_dim" in call.target
    dim = call.arg(2, "dim") if along else call.arg(1, "dim")
    x, index = call.operands[0].shape, call.operands[1].shape
    if dim is None or not x or len(x) != len(index):
        return Rule(linear=((0,),))
    dim = wrap(dim, len(x))
    read, term, result = names(len(x)), names(len(x)), names(len(x))
    for i, (size, wanted) in enumerate(zip(x, index, strict=True)):
        if i == dim:
            read[i], term[i], result[i] = [_mark(call) + "c"], ["k"], ["k"]
        elif size != wanted and along:  # one of them is broadcast
            (read if size == 1 else term)[i] = ["1"]
        elif size != wanted:  # only the first places are read
            read[i], term[i], result[i] = ["1"], ["1"], ["1"]
    return from_labels(
        [read, term], [result], call, kernels=_serving("c"), kernel="index.gather", linear=((0,),), **INDEX
    )


@rule("aten.index_select.default")
def index_select(call: Call) -> Rule:
    rank = call.rank
    if not rank or not call.operands[1].shape:
        return Rule(linear=((0,),))
    dim = wrap(call.arg(1, "dim"), rank)
    x: Term = [[_mark(call) + "c" if i == dim else f"d{i}"] for i in range(rank)]
    result: Term = [["k" if i == dim else f"d{i}"] for i in range(rank)]
    return from_labels(
        [x, [["k"]]], [result], call, kernels=_serving("c"), kernel="index.gather", linear=((0,),), **INDEX
    )


# ---------------------------------------------------------------------------------------------
# x[i, :, j]


def _indexed(call: Call) -> tuple[Term, list[Term], Term] | None:
    """Labels of x, of each index, and of what they select; None for masks."""
    x, indices = call.operands[0].shape, call.arg(1, "indices")
    tensors = {d: call.operands[i.index] for d, i in enumerate(indices) if isinstance(i, Ref)}
    if any(t.dtype in ("bool", "uint8") for t in tensors.values()):
        return None
    rank = max((len(t.shape) for t in tensors.values()), default=0)
    terms = [
        [["1"] if size == 1 else [f"i{rank - len(t.shape) + j}"] for j, size in enumerate(t.shape)]
        for t in tensors.values()
    ]
    whole: Term = [[f"i{j}"] for j in range(rank)]
    source: Term = [[f"r{d}" if d in tensors else f"d{d}"] for d in range(len(x))]
    first, last = min(tensors), max(tensors)
    together = last - first + 1 == len(tensors)
    before = [source[d] for d in range(len(x)) if d not in tensors and (together and d < first)]
    after = [source[d] for d in range(len(x)) if d not in tensors and not (together and d < first)]
    return source, terms, [*before, *whole, *after]


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(call: Call) -> Rule:
    labels = _indexed(call)
    if labels is None:
        return _selected(call)
    source, terms, result = labels
    source = [[_mark(call) + s[0]] if s[0].startswith("r") else s for s in source]
    kernels = _serving(*(f"r{d}" for d in range(len(source))))
    return from_labels([source, *terms], [result], call, kernels=kernels, kernel="index.index", linear=((0,),), **INDEX)


def _selected(call: Call) -> Rule:
    """x[:, mask]: how many are selected depends on data; the other dims are shared."""
    indices, rank = call.arg(1, "indices"), call.rank
    if len(call.operands) != 2:
        return Rule(linear=((0,),))
    first, many = next(d for d, i in enumerate(indices) if i is not None), len(call.operands[1].shape)
    x: Term = [["1"] if first <= d < first + many else [f"d{d}"] for d in range(rank)]
    return from_labels([x, None], [[*x[:first], ["1"], *x[first + many :]]], call, linear=((0,),))


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(call: Call) -> Rule:
    """Only where writes add up may they be dealt out: then what is written to is a partial sum as well."""
    values = call.arg(2, "values")
    linear = ((0, values.index),)
    labels = _indexed(call)
    if labels is None:
        return _masked(call, linear)
    source, terms, selected = labels
    adds = call.arg(3, "accumulate", False)
    kernels = _serving(*(f"r{d}" for d in range(len(source))))
    kernels |= {f"i{j}": Kernel(operands=override(call, 0, "P")) for j in range(len(selected)) if adds}
    if not adds:
        terms = [_blocked(t) for t in terms]
        selected = [["!" + s[0]] if s[0].startswith("i") else s for s in selected]
    shape = call.operands[values.index].shape
    written = aligned(shape, selected)
    return from_labels(
        [source, *terms, written], [source], call, kernels=kernels, kernel="index.index_put", linear=linear,
        **INDEX,
    )  # fmt: skip


def _blocked(term: Term) -> Term:
    return [[label if label == "1" else "!" + label for label in labels] for labels in term]


def _masked(call: Call, linear: tuple[tuple[int, ...], ...]) -> Rule:
    """x[mask] = one value: as good as pointwise. Several values are taken in order, so x stays whole."""
    indices, values = call.arg(1, "indices"), call.operands[call.arg(2, "values").index]
    if len(indices) != 1 or values.elements != 1 or call.operands[1].dtype != "bool":
        return Rule(linear=linear)
    x: Term = [[f"d{i}"] for i in range(call.rank)]
    mask = x[: len(call.operands[1].shape)]
    return from_labels([x, mask, None], [x], call, linear=linear)


# ---------------------------------------------------------------------------------------------
# Writing


def _written(call: Call, adds: bool, linear: tuple[tuple[int, ...], ...] = ()) -> Rule:
    """x with some places along a dim overwritten (in order, so only x is dealt out) or added to."""
    shape, rank = call.operands[0].shape, call.rank
    flat = "index_" in call.target  # index_add and the like: one index for all other dims
    # What is written, and with scatter also the index, has the dims of x.
    written = [t for t in call.operands[1 + flat :] if len(t.shape) == rank]
    if not shape or (not flat and call.operands[1] not in written):
        return Rule(linear=linear)
    dim = wrap(call.arg(1, "dim"), rank)
    # scatter may write less than all along the other dims: such a dim is not split.
    shared = [i for i in range(rank) if i != dim and all(t.shape[i] == shape[i] for t in written)]
    # Nor is the written dim, if there is more to write than there are indices.
    k = "1" if len({t.shape[dim] for t in written}) > 1 else "k" if adds else "!k"
    x: Term = [["c"] if i == dim else [f"d{i}"] if i in shared else ["1"] for i in range(rank)]
    part: Term = [[k] if i == dim else x[i] for i in range(rank)]
    terms = [part if t in written else [[k]] * len(t.shape) for t in call.operands[1:]]
    kernels = {"c": Kernel(), "k": Kernel(operands=override(call, 0, "P"))}
    return from_labels([x, *terms], [x], call, kernels=kernels, kernel="index.scatter", linear=linear, **INDEX)


@rule("aten.scatter.src", "aten.scatter.value", "aten.index_copy.default", "aten.index_fill.int_Scalar",
      "aten.index_fill.int_Tensor")  # fmt: skip
def scatter(call: Call) -> Rule:
    pair = ((0, 2),) if len(call.operands) == 3 else ((0,),) if call.arg(3, "value") == 0 else ()
    return _written(call, adds=False, linear=pair)


@rule("aten.scatter_add.default", "aten.index_add.default")
def scatter_add(call: Call) -> Rule:
    return _written(call, adds=True, linear=((0, 2),))


@rule("aten.scatter_reduce.two")
def scatter_reduce(call: Call) -> Rule:
    sums = call.arg(4, "reduce") == "sum"
    adds = sums and call.arg(5, "include_self", True)
    return _written(call, adds, ((0, 2),) if sums else ())


@rule("aten.masked_scatter.default")
def masked_scatter(call: Call) -> Rule:
    """Values are taken in order of the mask: no dim can be split."""
    return Rule(linear=((0, 2),))


# ---------------------------------------------------------------------------------------------
# Counting and searching


@rule("aten.one_hot.default")
def one_hot(call: Call) -> Rule:
    if call.arg(1, "num_classes", -1) < 0:  # as many as the largest number here asks for
        return Rule()
    x: Term = [[f"d{i}"] for i in range(call.rank)]
    return from_labels([x], [[*x, ["c"]]], call, kernels={"c": Kernel()}, kernel="index.one_hot")


@rule("aten.histc.default")
def histc(call: Call) -> Rule:
    if call.arg(2, "min", 0) == call.arg(3, "max", 0):  # the range comes from the data
        return Rule()
    return from_labels([[[f"d{i}"] for i in range(call.rank)]], [[["1"]]], call)


@rule("aten.bincount.default")
def bincount(call: Call) -> Rule:
    """The size of the result comes from the data."""
    return Rule()


@rule("aten.searchsorted.Tensor", "aten.bucketize.Tensor")
def searchsorted(call: Call) -> Rule:
    """Places are counts of smaller boundaries, so with the boundaries split they are partial sums."""
    boundaries, values = (0, 1) if "searchsorted" in call.target else (1, 0)
    ordered = len(call.operands) == 2  # with a sorter, boundaries are not in order
    rows = len(call.operands[boundaries].shape) - 1
    searched: Term = [[f"d{i}"] for i in range(len(call.operands[values].shape))]
    terms: list[Term] = [searched, searched]
    terms[boundaries] = [*(searched[:rows] if rows else []), ["c" if ordered else "!c"]]
    return from_labels(terms if ordered else [*terms, terms[boundaries]], [searched], call)


# ---------------------------------------------------------------------------------------------
# Embeddings: tokens, features, or the rows of the table are dealt out


@rule("aten.embedding.default", wording=Wording(factors={"v": "vocabulary", "h": "features"}))
def embedding(call: Call) -> Rule:
    """With the rows split, each rank looks up the tokens it knows: the result is a partial sum."""
    table, indices = number(call, 0, "weight"), number(call, 1, "indices")
    assert table is not None and indices is not None
    # Gradients divided by how often a token occurs need all tokens.
    mark = "!" if call.arg(3, "scale_grad_by_freq", False) else ""
    tokens: Term = [[f"{mark}d{i}"] for i in range(len(call.operands[indices].shape))]
    operands = placed(call, (0, "weight", [[mark + "v"], ["h"]]), (1, "indices", tokens))
    return from_labels(
        operands,
        [[*tokens, ["h"]]],
        call,
        kernels={"v": Kernel()},
        kernel="index.embedding",
        linear=((table,),),
        family="embedding",
        looked_up=table,
        backward=1.0,
    )


@rule("aten.embedding_bag.default", "aten.embedding_bag.padding_idx", "aten._embedding_bag.default")
def embedding_bag(call: Call) -> Rule:
    """Features only; what comes with the bags is the same on all ranks."""
    largest = call.arg(4, "mode", 0) == 2  # its fourth result then is by feature, too
    if largest:
        return Rule()
    operands = placed(call, (0, "weight", [["1"], ["h"]]))
    whole = Kernel(results=(None, "R", "R", "R"))
    return from_labels(operands, [[["1"], ["h"]], None, None, None], call, kernels={"h": whole})
