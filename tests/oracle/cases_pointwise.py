"""Cases of pointwise operators."""

import torch

from tests.oracle.harness import Case, booleans, floats, integers, positive

MESHES = ((2,), (3,), (2, 2))  # one kind of rule for all: fewer meshes will do

UNARY = """
    abs alias angle asin atan asinh bitwise_not ceil celu clone contiguous conj conj_physical _conj cos cosh detach
    elu erf erfc erfinv exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh imag isfinite isinf
    isnan leaky_relu lgamma lift_fresh_copy log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num neg
    negative positive real reciprocal relu relu6 resolve_conj resolve_neg round rsqrt selu sgn sigmoid sign signbit
    silu sin sinc sinh softplus softshrink special_expit sqrt square tan tanh trunc zeros_like ones_like acos acosh
    atanh
"""
COMPARED = """
    eq ge gt le lt ne greater greater_equal less less_equal not_equal
"""
BITWISE = """
    bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__
"""
RANKED = """
    maximum.default max.other minimum.default min.other fmax.default fmin.default hypot.default atan2.default
    logaddexp.default copysign.Tensor fmod.Tensor remainder.Tensor pow.Tensor_Tensor xlogy.Tensor sub.Tensor
    add.Tensor mul.Tensor div.Tensor subtract.Tensor multiply.Tensor divide.Tensor true_divide.Tensor
    clamp_min.Tensor clamp_max.Tensor rsub.Tensor isclose.default
"""


def unary(name: str) -> Case:
    x = positive(4, 3)
    if name in ("bitwise_not", "logical_not"):
        x = booleans(4, 3)
    elif name in ("imag", "real", "conj", "_conj", "conj_physical", "resolve_conj"):
        x = torch.complex(floats(4, 3), floats(4, 3))
    elif name == "acosh":
        x = x + 1
    elif name in ("erfinv", "atanh", "acos", "asin", "logit"):
        x = positive(4, 3) / 1.3
    return Case(f"aten.{name}.default", (x,), meshes=MESHES)


def scalars() -> list[Case]:
    x, n = positive(4, 3), integers(4, 3, high=9)
    return [
        *(Case(f"aten.{name}.Scalar", (n, 4), meshes=MESHES) for name in (COMPARED + BITWISE).split()),
        *(Case(f"aten.{name}.Scalar", (n, 1)) for name in ("__lshift__", "__rshift__")),
        *(Case(f"aten.bitwise_{side}_shift.Tensor_Scalar", (n, 1)) for side in ("left", "right")),
        *(Case(f"aten.{name}.Scalar", (x, 2.0)) for name in (
            "add", "sub", "rsub", "mul", "multiply", "div", "divide", "true_divide", "fmod", "remainder", "copysign",
        )),
        Case("aten.floor_divide.Scalar", (n, 4)),
        Case("aten.pow.Scalar", (2.0, x)),
        Case("aten.pow.Tensor_Scalar", (x, 2)),
        Case("aten.pow.Tensor_Scalar", (x, 0.5)),
        Case("aten.remainder.Scalar_Tensor", (7, n + 1)),
        Case("aten.div.Scalar_mode", (n, 4), {"rounding_mode": "floor"}),
        Case("aten.round.decimals", (x,), {"decimals": 1}),
        Case("aten.add.Tensor", (x, 2.0)),
        Case("aten.sub.Tensor", (x, 2.0), {"alpha": 3}),
        Case("aten.mul.Tensor", (x, 2.0)),
        Case("aten.div.Tensor", (x, 2.0)),
        Case("aten.clamp.default", (x, 0.3, 0.8)),
        Case("aten.clip.default", (x, None, 0.8)),
        Case("aten.clamp_min.default", (x, 0.5)),
        Case("aten.clamp_max.default", (x, 0.5)),
        Case("aten.threshold.default", (x, 0.5, 0.1)),
        Case("aten.full_like.default", (x, 3.0)),
        Case("aten.gelu.default", (x,), {"approximate": "tanh"}),
        Case("aten.leaky_relu.default", (floats(5, 2), 0.2)),
    ]  # fmt: skip


def binary() -> list[Case]:
    x, y, row, column = positive(4, 6), positive(4, 6), positive(6), positive(5, 1, 1)
    n, m = integers(4, 6, high=9, low=1), integers(4, 1, high=5, low=1)
    return [
        *(Case(f"aten.{name}", (x, row), meshes=MESHES) for name in RANKED.split()),
        *(Case(f"aten.{name}.Tensor", (x, y)) for name in ("add", "mul", "div", "sub")),
        *(Case(f"aten.{name}.Tensor", (x, column)) for name in ("add", "mul", "div", "sub")),
        Case("aten.add.Tensor", (floats(4, 1, 3), floats(5, 1)), {"alpha": 2}),
        Case("aten.add.Tensor", (x, floats())),
        Case("aten.mul.Tensor", (floats(), x)),
        Case("aten.mul.Tensor", (x, booleans(4, 6))),
        Case("aten.mul.Tensor", (x, y), frozen=(1,)),
        *(Case(f"aten.{name}.Tensor", (n, m), meshes=MESHES) for name in (COMPARED + BITWISE).split()),
        *(Case(f"aten.logical_{name}.default", (booleans(4, 6), booleans(6))) for name in ("and", "or", "xor")),
        *(Case(f"aten.bitwise_{side}_shift.Tensor", (n, m)) for side in ("left", "right")),
        Case("aten.floor_divide.default", (n, m)),
        Case("aten.div.Tensor_mode", (n, m), {"rounding_mode": "floor"}),
        Case("aten.div.Tensor_mode", (x, row), {"rounding_mode": None}),
        Case("aten.clamp.Tensor", (x, row / 2, x + 1)),
        Case("aten.heaviside.default", (x, row), frozen=(0, 1)),
        Case("aten.polar.default", (positive(4, 6), floats(4, 6))),
        Case("aten.complex.default", (floats(4, 6), floats(4, 6))),
        Case("aten.mul.Tensor", (torch.complex(x, y), torch.complex(row, row))),
        Case("aten.prelu.default", (floats(4, 6, 2), floats(6))),
        Case("aten.prelu.default", (floats(4, 6), floats(1))),
    ]


def several() -> list[Case]:
    x, y, mask = floats(4, 6), floats(4, 6), booleans(4, 6)
    return [
        Case("aten.where.self", (mask, x, y)),
        Case("aten.where.self", (booleans(4, 1), x, floats(5, 1, 1))),
        Case("aten.where.ScalarSelf", (mask, 0.0, y)),
        Case("aten.where.ScalarOther", (mask, x, 0)),
        Case("aten.where.ScalarOther", (mask, x, -1e9)),
        Case("aten.where.Scalar", (mask, 1.0, 0.0)),
        Case("aten.masked_fill.Scalar", (x, booleans(6), 0.0)),
        Case("aten.masked_fill.Scalar", (x, booleans(4, 1), float("-inf"))),
        Case("aten.masked_fill.Scalar", (floats(4, 1), booleans(4, 6), 1.0)),
        Case("aten.masked_fill.Tensor", (x, mask, floats())),
        Case("aten.lerp.Scalar", (x, y, 0.3)),
        Case("aten.lerp.Tensor", (x, y, floats(6))),
        Case("aten.addcmul.default", (x, y, floats(6)), {"value": 0.5}),
        Case("aten.addcdiv.default", (x, y, positive(4, 1))),
        Case("aten.glu.default", (floats(4, 6), -1)),
        Case("aten.glu.default", (floats(4, 6, 3), 1)),
        Case("aten.dropout.default", (x, 0.5, False)),
        Case("aten.dropout.default", (x, 0.5, True), exact=False),
        Case("aten.feature_dropout.default", (floats(4, 6, 2, 2), 0.5, True), exact=False),
        Case("aten.alpha_dropout.default", (x, 0.5, True), exact=False),
        Case("aten.native_dropout.default", (x, 0.0, True)),
        *(Case(f"aten.{n}.default", (x,), exact=False) for n in ("rand_like", "randn_like", "empty_like")),
        *(
            Case(f"aten.{n}.default", (x,), frozen=(0,), exact=False)
            for n in ("exponential", "uniform", "normal_functional", "log_normal", "cauchy", "random")
        ),
        Case("aten.geometric.default", (x, 0.5), frozen=(0,), exact=False),
        Case("aten.randint_like.default", (integers(4, 6, high=3), 5), exact=False),
        Case("aten.bernoulli.default", (positive(4, 6) / 2,), frozen=(0,), exact=False),
        Case("aten.bernoulli.p", (x, 0.5), frozen=(0,), exact=False),
    ]


def casts() -> list[Case]:
    x = floats(4, 6)
    return [
        Case("aten.to.dtype", (x, torch.complex128)),
        Case("aten.to.dtype", (integers(4, 6, high=9), torch.float64)),
        Case("aten.to.dtype", (booleans(4, 6), torch.int64)),
        Case("aten.to.dtype_layout", (x,), {"dtype": torch.float64, "layout": torch.strided}),
        Case("aten.to.device", (x, "cpu", torch.float64)),
        Case("aten.to.prim_Device", (x, "cpu")),
        Case("aten.to.prim_dtype", (x, torch.float64)),
        # the second operand lends its dtype only: any layout of it would do, B is offered
        Case(
            "aten.to.other",
            (integers(4, 6, high=9), floats(3, 6)),
            frozen=(1,),
            known=frozenset({"S(0), S(1) -> S(0)", "S(1), S(1) -> S(1)"}),
        ),
        Case("aten._to_copy.default", (x,), {"dtype": torch.float64}),
        Case("aten.type_as.default", (integers(4, 6, high=9), floats(3)), frozen=(1,)),
    ]


CASES: list[Case] = [*map(unary, UNARY.split()), *scalars(), *binary(), *several(), *casts()]
