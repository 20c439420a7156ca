"""Pointwise operators, and tensors made from constants: every dim of the result is a factor, operands may be
broadcast."""

from collections.abc import Callable

from tapas.ir.graph import ITEMSIZE, Ref
from tapas.ir.regions import region_named
from tapas.rules.base import Arguments, At, Call, Factor, Local, Rule, Wording, rule
from tapas.rules.notation import blocked, broadcast, distinct, from_labels, is_number, names, replaced

# Nothing passes through these but whole values and shards.
PLAIN = """
    add.Scalar sub.Scalar rsub.Scalar
    abs.default acos.default acosh.default addcdiv.default angle.default asin.default asinh.default atan.default
    atan2.default atanh.default bitwise_and.Tensor bitwise_and.Scalar bitwise_not.default bitwise_or.Tensor
    bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar
    bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar __and__.Tensor __and__.Scalar __or__.Tensor
    __or__.Scalar __xor__.Tensor __xor__.Scalar __lshift__.Scalar __rshift__.Scalar ceil.default celu.default
    clamp.default clamp.Tensor clamp_min.default clamp_min.Tensor clamp_max.default clamp_max.Tensor clip.default
    copysign.Tensor copysign.Scalar cos.default cosh.default div.Tensor_mode div.Scalar_mode eq.Tensor eq.Scalar
    ge.Tensor ge.Scalar gt.Tensor gt.Scalar le.Tensor le.Scalar lt.Tensor lt.Scalar ne.Tensor ne.Scalar greater.Tensor
    greater.Scalar greater_equal.Tensor greater_equal.Scalar less.Tensor less.Scalar less_equal.Tensor
    less_equal.Scalar not_equal.Tensor not_equal.Scalar erf.default erfc.default erfinv.default floor.default
    floor_divide.default floor_divide.Scalar fmax.default fmin.default fmod.Scalar fmod.Tensor frac.default
    gelu.default hardshrink.default hardsigmoid.default hardswish.default hardtanh.default heaviside.default
    hypot.default isclose.default isfinite.default isinf.default isnan.default leaky_relu.default lgamma.default
    log.default log10.default log1p.default log2.default log_sigmoid.default logaddexp.default logical_and.default
    logical_not.default logical_or.default logical_xor.default logit.default maximum.default max.other minimum.default
    min.other mish.default nan_to_num.default polar.default pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
    relu6.default remainder.Scalar remainder.Tensor remainder.Scalar_Tensor round.default round.decimals selu.default
    sgn.default sign.default signbit.default silu.default sin.default sinc.default sinh.default softplus.default
    softshrink.default special_expit.default square.default tan.default threshold.default trunc.default xlogy.Tensor
    zeros_like.default ones_like.default full_like.default empty_like.default
"""

# Their derivatives are written in terms of their results.
SAVING_RESULT = """
    exp.default exp2.default expm1.default relu.default rsqrt.default sigmoid.default sqrt.default tanh.default
    reciprocal.default elu.default
"""

# Linear in their one tensor, whatever else they are given: partial sums pass.
LINEAR = """
    alias.default clone.default contiguous.default detach.default lift_fresh_copy.default neg.default
    negative.default positive.default conj.default conj_physical.default real.default imag.default
    resolve_conj.default resolve_neg.default _conj.default mul.Scalar multiply.Scalar div.Scalar divide.Scalar
    true_divide.Scalar
"""

CASTS = """
    to.dtype to.dtype_layout to.device to.prim_Device to.prim_dtype _to_copy.default type_as.default to.other
"""

RANDOM = """
    bernoulli.default bernoulli.p rand_like.default randn_like.default randint_like.default exponential.default
    uniform.default normal_functional.default log_normal.default geometric.default cauchy.default random.default
"""

FLOATING = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def pointwise(call: Call, family: str = "", **options) -> Rule:
    whole = call.results[0].shape
    terms = [broadcast(t.shape, whole) for t in call.operands]
    family = family or _family(call)
    return from_labels(terms, [names(len(whole))] * len(call.results), call, family=family, **options)


def _family(call: Call) -> str:
    """Kernels are fast where all tensors lie alike, in one dtype."""
    made = call.results[0]
    alike = all(t.shape == made.shape and t.dtype == made.dtype for t in call.operands if t.elements > 1)
    return "pointwise" if alike else "strided"


def _passes(call: Call, each: float) -> float:
    """What gradients of operands read and write, `each` as much as the forward pass; the gradient of one that is
    broadcast is added up as well, which is another pass."""
    made = call.results[0].shape
    return sum(each if t.shape == made else each + 1.0 for t in call.operands if t.priced)


def _aten(listed: str) -> list[str]:
    return [f"aten.{name}" for name in listed.split()]


@rule(*_aten(PLAIN))
def plain(call: Call) -> Rule:
    return pointwise(call, backward=POWER if ".pow." in call.target else 1.5)


POWER = 3.5  # its derivative is a power, too, times a number and times the gradient: three kernels


@rule(*_aten(SAVING_RESULT))
def saving_result(call: Call) -> Rule:
    return pointwise(call, saves_result=True)


@rule(*_aten(LINEAR))
def linear(call: Call) -> Rule:
    name = call.target.split(".")[1]
    copies = name in ("clone", "contiguous", "lift_fresh_copy")  # gradients pass as they are
    family, backward = ("strided", 0.0) if copies else ("", 1.0)
    return pointwise(call, family, linear=((0,),), view=name in ("alias", "detach"), backward=backward)


@rule(*_aten(CASTS))
def cast(call: Call) -> Rule:
    """Partial sums stay what they are in another floating dtype; the second tensor only lends its dtype."""
    before, after = call.operands[0], call.results[0]
    terms = [names(len(before.shape)), *([None] * (len(call.operands) - 1))]
    sums = ((0,),) if before.dtype in FLOATING and after.dtype in FLOATING else ()
    family = "narrowing" if ITEMSIZE[after.dtype] < ITEMSIZE[before.dtype] else "widening"
    return from_labels(terms, [names(len(after.shape))], call, linear=sums, view=before.dtype == after.dtype,
                       backward=1.0, family=family)  # fmt: skip


@rule("aten.add.Tensor", "aten.sub.Tensor", "aten.subtract.Tensor", "aten.rsub.Tensor")
def add(call: Call) -> Rule:
    """Partial sums pass through all terms at once; a constant would be added once a rank.

    Gradients pass as they are. But where sums are made, streams meet that parted before, and so do their gradients:
    adding those up takes as long. Gradients of operands that are broadcast are read to be added up."""
    tensors = all(isinstance(call.args[i], Ref) for i in (0, 1))
    return pointwise(
        call, linear=(tuple(range(len(call.operands))),) if tensors else (), backward=max(_passes(call, 0.0), 1.0)
    )


@rule("aten.mul.Tensor", "aten.multiply.Tensor")
def mul(call: Call) -> Rule:
    linear = tuple((i,) for i in range(len(call.operands))) if distinct(call) else ()
    return pointwise(call, linear=linear, backward=_passes(call, 1.0))


@rule("aten.div.Tensor", "aten.divide.Tensor", "aten.true_divide.Tensor")
def div(call: Call) -> Rule:
    """Linear in the dividend; 1 / x has none."""
    return pointwise(call, linear=((0,),) if isinstance(call.args[0], Ref) and distinct(call) else ())


@rule("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar")
def where(call: Call) -> Rule:
    """Partial sums pass through both branches at once, and beside a branch of zeros."""
    branches = call.args[1:3]
    group = tuple(v.index for v in branches if isinstance(v, Ref))
    passes = group and all(isinstance(v, Ref) or is_number(v, 0) for v in branches) and call.args[0] not in branches
    return pointwise(call, linear=(group,) if passes else ())


@rule("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(call: Call) -> Rule:
    value = call.arg(2, "value")
    if isinstance(value, Ref):
        return pointwise(call, linear=((0, value.index),))
    return pointwise(call, linear=((0,),) if is_number(value, 0) else ())


@rule("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(call: Call) -> Rule:
    return pointwise(call, linear=((0, 1),) if distinct(call) else ())


@rule("aten.addcmul.default")
def addcmul(call: Call) -> Rule:
    return pointwise(call, linear=((0, 1), (0, 2)) if distinct(call) else ())


@rule("aten.complex.default")
def from_parts(call: Call) -> Rule:
    return pointwise(call, linear=((0, 1),))


@rule("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default")
def dropout(call: Call) -> Rule:
    """Switched off it is nothing at all; else each rank draws for its own shard."""
    off = not call.arg(2, "train") or is_number(call.arg(1, "p"), 0)
    if off:
        return pointwise(call, linear=((0,),), view=True)
    rank = call.rank
    per_channel = call.target.startswith("aten.feature") and rank > 2
    term = [["!" + d[0]] if per_channel and i > 1 else d for i, d in enumerate(names(rank))]
    return from_labels([term], [term], call, random=True, family="pointwise")


@rule("aten.native_dropout.default")
def native_dropout(call: Call) -> Rule:
    return pointwise(call, random=bool(call.arg(2, "train")) and not is_number(call.arg(1, "p"), 0))


@rule(*_aten(RANDOM))
def drawn(call: Call) -> Rule:
    return pointwise(call, random=True)


@rule("aten.glu.default")
def glu(call: Call) -> Rule:
    """The dim holds values and gates one after the other: a rank takes its part of both."""
    rank = call.rank
    dim = call.arg(1, "dim", -1) % rank
    factors = (
        Factor(f"d{d}", size, (At(d, repeat=2 if d == dim else 1),), (At(d),))
        for d, size in enumerate(call.results[0].shape)
        if size > 1
    )
    return Rule(tuple(factors))


@rule("aten.prelu.default")
def prelu(call: Call) -> Rule:
    """One slope, or one for each channel (dim 1)."""
    term = names(call.rank)
    per_channel = call.operands[1].shape != () and call.operands[1].elements > 1
    slopes = [term[1] if per_channel else ["1"]] if call.operands[1].shape else []
    return from_labels([term, slopes], [term], call)


# ---------------------------------------------------------------------------------------------
# Tensors made from constants: a rank makes its part


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
def drawn_of_size(call: Call) -> Rule:
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
    rank = call.rank
    term = blocked(names(rank), (rank - 2, rank - 1))
    return from_labels([term], [term], call, linear=((0,),))


@rule("tapas.function.default", wording=Wording(name="custom function"))
def custom_function(call: Call) -> Rule:
    """A user's own torch.autograd.Function: nobody knows what it does, and its gradient may be anything."""
    return Rule(own_gradient=True, unknown_work=True)


@rule("tapas.region.default", wording=Wording(name="code that stays whole"))
def region(call: Call) -> Rule:
    """Statements of the model's own, on whole tensors."""
    return Rule(unknown_work=True, random=region_named(call.args[1]).random)
