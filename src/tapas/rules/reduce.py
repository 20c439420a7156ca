"""Reductions and what else works along one dim: sums split it, most others keep it whole."""

from tapas.rules.base import Call, Kernel, Rule, rule
from tapas.rules.notation import Term, blocked, dims_of, from_labels, names


def reduced(call: Call, dims: tuple[int, ...], keep: bool, block: bool = True, **options) -> Rule:
    """Results lose `dims`, or keep them with size one. `block`: parts of those dims are no use."""
    term = names(call.rank)
    result: Term = [["1"] if d in dims else labels for d, labels in enumerate(term) if keep or d not in dims]
    operand = blocked(term, dims) if block else term
    return from_labels([operand], [result] * len(call.results), call, family="reduction", **options)


def _dims(call: Call, index: int = 1) -> tuple[int, ...]:
    """The dims of `op(x, dim, ...)`."""
    return dims_of(call.arg(index, "dim"), call.rank)


def _every(call: Call) -> tuple[int, ...]:
    return tuple(range(call.rank))


@rule("aten.sum.default", "aten.sum.dim_IntList", "aten.nansum.default")
def sum_dims(call: Call) -> Rule:
    linear = ((0,),) if call.target.startswith("aten.sum") else ()
    return reduced(call, _dims(call), bool(call.arg(2, "keepdim", False)), block=False, linear=linear)


@rule("aten.mean.default", "aten.mean.dim")
def mean(call: Call) -> Rule:
    """A rank's share of a mean is its sum over the size of the whole dims: a kernel that sends nothing."""
    keep, kernels = bool(call.arg(2, "keepdim", False)), {f"d{d}": Kernel() for d in _dims(call)}
    return reduced(call, _dims(call), keep, block=False, linear=((0,),), kernels=kernels, kernel="normalize.mean")


@rule("aten.count_nonzero.dim_IntList", "aten.count_nonzero.default")
def count_nonzero(call: Call) -> Rule:
    return reduced(call, _dims(call), False, block=False)


@rule("aten.amax.default", "aten.amin.default", "aten.logsumexp.default", "aten.var.dim", "aten.std.dim",
      "aten.prod.dim_int", "aten.all.dim", "aten.any.dim", "aten.all.dims", "aten.any.dims",
      "aten.max.dim", "aten.min.dim", "aten.median.dim", "aten.mode.default",
      "aten.argmax.default", "aten.argmin.default", "aten.aminmax.default")  # fmt: skip
def whole_dims(call: Call) -> Rule:
    name = call.target.split(".")[1]
    where = {"var": 3, "std": 3, "aminmax": 2}.get(name, 2)
    keep = bool(call.arg(where, "keepdim", False))
    dims = dims_of(dict(call.kwargs).get("dim"), call.rank) if name == "aminmax" else _dims(call)
    if name == "mode" and call.arg(1, "dim") is None:
        dims = (call.rank - 1,)
    return reduced(call, dims, keep)


@rule("aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.std_mean.correction")
def moments(call: Call) -> Rule:
    return reduced(call, _dims(call), bool(dict(call.kwargs).get("keepdim", False)))


@rule("aten.max.default", "aten.min.default", "aten.prod.default", "aten.all.default", "aten.any.default",
      "aten.var.default", "aten.std.default", "aten.median.default")  # fmt: skip
def whole_tensor(call: Call) -> Rule:
    return reduced(call, _every(call), False)


@rule("aten.norm.Scalar", "aten.norm.ScalarOpt_dim", "aten.linalg_vector_norm.default", "aten.linalg_norm.default",
      "aten.linalg_norm.ord_str")  # fmt: skip
def norm(call: Call) -> Rule:
    dims = _every(call) if call.target.endswith(".Scalar") else dims_of(call.arg(2, "dim"), call.rank)
    return reduced(call, dims, bool(call.arg(3, "keepdim", False)))


# ---------------------------------------------------------------------------------------------
# Along a dim that stays


def along(call: Call, dim: int | tuple[int, ...] | None, **options) -> Rule:
    """Results have the operand's dims; one of them (None: all) is kept whole and may change its size."""
    rank = call.rank
    dims = dims_of(dim, rank)
    term = blocked(names(rank), dims)
    results = [
        [
            [f"!r{d}"] if d in dims and t.shape[d] != call.operands[0].shape[d] else labels
            for d, labels in enumerate(term)
        ]
        for t in call.results
    ]
    return from_labels([term], results, call, **options)


@rule("aten.cumsum.default", "aten.fft_fftshift.default", "aten.fft_ifftshift.default")
def linear_along(call: Call) -> Rule:
    return along(call, call.arg(1, "dim"), linear=((0,),))


@rule("aten.diff.default")
def diff(call: Call) -> Rule:
    """With up to two tensors put before and after, which have the other dims as well."""
    rank = call.rank
    dim = call.arg(2, "dim", -1) % rank

    def term(name: str) -> Term:
        return [[f"!{name}"] if d == dim else labels for d, labels in enumerate(names(rank))]

    terms = [term(f"x{i}") for i in range(len(call.operands))]
    return from_labels(terms, [term("y")], call, linear=(tuple(range(len(terms))),))


@rule("aten.cumprod.default", "aten.cummax.default", "aten.cummin.default", "aten.logcumsumexp.default")
def cumulative(call: Call) -> Rule:
    return along(call, call.arg(1, "dim"))


@rule("aten.topk.default")
def topk(call: Call) -> Rule:
    return along(call, call.arg(2, "dim", -1), family="sort")


@rule("aten.sort.default", "aten.argsort.default", "aten.msort.default")
def sort(call: Call) -> Rule:
    return along(call, call.arg(1, "dim", 0 if "msort" in call.target else -1), family="sort")


@rule("aten.sort.stable", "aten.argsort.stable")
def sort_stable(call: Call) -> Rule:
    return along(call, dict(call.kwargs).get("dim", -1), family="sort")


@rule(*(f"aten.fft_{name}.default" for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")))
def fft(call: Call) -> Rule:
    return along(call, call.arg(2, "dim", -1), linear=((0,),))


@rule(
    *(f"aten.fft_{name}.default" for name in ("fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn"))
)
def fft_dims(call: Call) -> Rule:
    dims, sizes = call.arg(2, "dim", (-2, -1) if "2." in call.target else None), call.arg(1, "s")
    if dims is None and sizes is not None:
        dims = tuple(range(-len(sizes), 0))
    return along(call, dims, linear=((0,),))


@rule("aten.multinomial.default")
def multinomial(call: Call) -> Rule:
    return along(call, -1, random=True)


@rule("aten.kthvalue.default")
def kthvalue(call: Call) -> Rule:
    return reduced(call, dims_of(call.arg(2, "dim", -1), call.rank), bool(call.arg(3, "keepdim", False)))
