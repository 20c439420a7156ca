"""Dims that grow, turn or are cut in windows: pad, roll, flip, unfold, repeat."""

from collections.abc import Sequence
from math import prod

from tapas.ir.graph import Ref
from tapas.rules.base import Arguments, At, Call, Factor, Local, Rule, rule
from tapas.rules.notation import Term, blocked, dims_of, from_labels, is_number, names, replaced, wrap

# ---------------------------------------------------------------------------------------------
# The dim is kept whole, the others are free


def _keeping(call: Call, dims: Sequence[int], **options) -> Rule:
    """The result has the operand's dims; those in `dims` are whole and may change their size."""
    term = names(call.rank)
    return from_labels(
        [[[f"!in{i}"] if i in dims else d for i, d in enumerate(term)]],
        [[[f"!out{i}"] if i in dims else d for i, d in enumerate(term)]],
        call,
        **options,
    )


@rule("aten.constant_pad_nd.default", "aten.pad.default", "aten.reflection_pad1d.default",
      "aten.reflection_pad2d.default", "aten.replication_pad1d.default", "aten.replication_pad2d.default")  # fmt: skip
def pad(call: Call) -> Rule:
    amounts, rank = call.arg(1, "pad", call.arg(1, "padding")), call.rank
    dims = [rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount]
    constant = call.target == "aten.constant_pad_nd.default" or (
        call.target == "aten.pad.default" and call.arg(2, "mode", "constant") == "constant"
    )
    filled = call.arg(2 if call.target == "aten.constant_pad_nd.default" else 3, "value") if constant else None
    return _keeping(call, dims, linear=((0,),) if filled is None or is_number(filled, 0) else ())


@rule("aten.roll.default")
def roll(call: Call) -> Rule:
    """Without dims the flattened tensor turns: then no dim is free."""
    return _keeping(call, dims_of(call.arg(2, "dims"), call.rank), linear=((0,),))


@rule("aten.flip.default", "aten.fliplr.default", "aten.flipud.default")
def flip(call: Call) -> Rule:
    dims = {"fliplr": (1,), "flipud": (0,)}.get(call.target.split(".")[1]) or call.arg(1, "dims")
    return _keeping(call, dims_of(dims, call.rank) if dims != () else (), linear=((0,),))


@rule("aten.unfold.default")
def unfold(call: Call) -> Rule:
    dim = wrap(call.arg(1, "dimension"), call.rank)
    term = names(call.rank)
    result = [[f"!windows{i}"] if i == dim else d for i, d in enumerate(term)]
    return from_labels([blocked(term, (dim,))], [[*result, ["!window"]]], call, linear=((0,),), view=True)


# ---------------------------------------------------------------------------------------------
# Repetition


@rule("aten.repeat.default", "aten.tile.default")
def repeat(call: Call) -> Rule:
    """Dim by dim: the times are a factor of the result alone, the dim stands in the result as often."""
    before, after = call.operands[0].shape, call.results[0].shape
    grown = len(after) - len(before)
    factors = []
    for d, whole in enumerate(after):
        size = before[d - grown] if d >= grown else 1
        times = whole // size if size else 1
        if size > 1:
            factors.append(Factor(f"d{d}", size, (At(d - grown),), (At(d, repeat=times),)))
        if times > 1:
            factors.append(Factor(f"r{d}", times, (None,), (At(d, inner=size),)))
    return Rule(tuple(factors), linear=((0,),), local=_local_repeat)


def _local_repeat(local: Local) -> Arguments:
    """Times per dim; where a rank holds nothing, none."""
    before, after = local.operand_shape(0), local.result_shape()
    padded = (*(1,) * (len(after) - len(before)), *before)
    times = tuple(whole // size if size else 1 for size, whole in zip(padded, after, strict=True))
    return replaced(local.call, 1, "dims" if "tile" in local.call.target else "repeats", times)


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(call: Call) -> Rule:
    """Each element stands `repeats` times in a row: the times are the minor part of the result's dim."""
    dim, rank = call.arg(2, "dim"), call.rank
    term = names(rank)
    sizes = {"times": call.arg(1, "repeats")} | {f"d{d}": size for d, size in enumerate(call.operands[0].shape)}
    result: Term = [[*(label for (label,) in term), "times"]]  # without a dim: of the flattened tensor
    if dim is not None:
        dim = wrap(dim, rank)
        result = [*term[:dim], [f"d{dim}", "times"], *term[dim + 1 :]]
    return from_labels([term], [result], call, sizes, linear=((0,),), local=_local_times)


def _local_times(local: Local) -> Arguments:
    """As often as fits this rank's share; where it holds nothing, any number will do."""
    before, after = prod(local.operand_shape(0)), prod(local.result_shape())
    times = after // before if before else local.call.arg(1, "repeats")
    return (local.call.args[0], times), (("dim", local.call.arg(2, "dim")),)


@rule("aten.repeat_interleave.self_Tensor", "aten.repeat_interleave.Tensor")
def repeat_by(call: Call) -> Rule:
    """How often is known to the values only."""
    if not isinstance(call.arg(1, "repeats"), Ref) or call.arg(2, "dim") is None:
        return Rule()
    dim = wrap(call.arg(2, "dim"), call.rank)
    term = names(call.rank)
    result = [["!out"] if i == dim else d for i, d in enumerate(term)]
    return from_labels([blocked(term, (dim,)), None], [result], call, linear=((0,),))
