"""Tensors made from constants: every dim of the result is a factor, a rank makes its part."""

from collections.abc import Callable

from tapas.rules.base import Arguments, Call, Local, Rule, rule
from tapas.rules.notation import blocked, from_labels, names, replaced


def _sized(index: int) -> Callable[[Local], Arguments]:
    return lambda local: replaced(local.call, index, "size", local.result_shape())


def made(call: Call, index: int, **options) -> Rule:
    """`index`: where the size stands in the arguments. Operands lend dtype or value, not shape."""
    operands = [None] * len(call.operands)
    return from_labels(operands, [names(len(call.results[0].shape))], call, local=_sized(index), **options)


@rule("aten.full.default", "aten.zeros.default", "aten.ones.default", "aten.empty.memory_format")
def constant(call: Call) -> Rule:
    return made(call, 0)


@rule("aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default", "aten.new_empty.default")
def new(call: Call) -> Rule:
    return made(call, 1)


@rule("aten.rand.default", "aten.randn.default")
def drawn(call: Call) -> Rule:
    return made(call, 0, random=True)


@rule("aten.randint.default", "aten.randint.low")
def drawn_integers(call: Call) -> Rule:
    return made(call, 1 if call.target.endswith("default") else 2, random=True)


@rule("aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.linspace.default",
      "aten.scalar_tensor.default", "aten.randperm.default", "aten.eye.default", "aten.eye.m",
      "aten.empty_strided.default", "aten.tril_indices.default", "aten.triu_indices.default",
      "aten.hann_window.default")  # fmt: skip
def whole(call: Call) -> Rule:
    """Each element knows its place: made whole, it is small."""
    terms = [names(len(t.shape)) for t in call.results]
    return from_labels([None] * len(call.operands), [blocked(t, range(len(t))) for t in terms], call)


@rule("aten.tril.default", "aten.triu.default")
def triangle(call: Call) -> Rule:
    """Rows and columns know their place."""
    rank = len(call.operands[0].shape)
    term = blocked(names(rank), (rank - 2, rank - 1))
    return from_labels([term], [term], call, linear=((0,),))
