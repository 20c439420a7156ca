"""Grouped matrix products and whole expert layers."""

from dataclasses import replace

from tapas.ir.graph import ITEMSIZE
from tapas.rules.base import At, Call, Kernel, Rule, Wording, rule
from tapas.rules.notation import distinct, einsum

WORDS = Wording(factors={"e": "experts", "t": "tokens", "k": "input features", "n": "output features"})


@rule("aten._grouped_mm.default", wording=WORDS)
def grouped_mm(call: Call) -> Rule:
    """Its operands' rows must start at multiples of 16 bytes: features are dealt out in such steps."""
    return _grouped(call, 16 // ITEMSIZE[call.operands[0].dtype])


@rule("transformers.grouped_mm_fallback.default", wording=WORDS)
def grouped_mm_fallback(call: Call) -> Rule:
    return _grouped(call, 1)


def _grouped(call: Call, step: int) -> Rule:
    """Rows sorted by expert, times their expert's matrix: every row meets one expert, not all of them."""
    ranks = tuple(len(t.shape) for t in call.operands)
    if ranks not in ((2, 3, 1), (3, 3)) or not distinct(call):
        return Rule()
    count, depth, width = call.operands[1].shape
    sizes = {"k": depth // step, "n": width // step, "a": step, "b": step}
    if ranks == (3, 3):
        return einsum("e m (k !a), e (k !a) (n !b) -> e m (n !b)", call, sizes, flops=2.0, linear=((0,), (1,)),
                      kernels={label: Kernel() for label in "emkn"}, kernel="products.channelwise",
                      products=(call.target,))  # fmt: skip
    return einsum(
        "t (k !a), e (k !a) (n !b), 1 -> t (n !b)", call, sizes, flops=2.0 / count, linear=((0,), (1,)),
        kernels={label: Kernel() for label in "tekn"}, kernel="products.grouped_mm", products=(call.target,),
    )  # fmt: skip


EXPERT_WORDS = {"e": "experts", "t": "tokens", "f": "features inside the experts", "k": "experts of a token"}


@rule("tapas.experts.default", wording=Wording(factors=EXPERT_WORDS))
def experts(call: Call) -> Rule:
    """hidden, index, weight, gate_up, down: tokens, their slots, experts, or the features inside an expert.

    Features of the result could be split as well, but gate_up would be repeated on every rank.
    """
    count, _, hidden = call.operands[3].shape
    found = einsum(
        "t !h, t k, t k, e 1 !h, e !o f -> t !o", call, flops=6.0 / (count * hidden), linear=((2,), (4,)),
        kernels={label: Kernel() for label in "tkef"}, kernel="products.experts", products=(call.target,),
    )  # fmt: skip
    # Gate and up are packed one after the other: each is split like the features of down.
    factors = tuple(
        replace(f, operands=(*f.operands[:3], At(1, repeat=2), *f.operands[4:])) if f.name == "f" else f
        for f in found.factors
    )
    return replace(found, factors=factors)
