"""Cases of norms, attention, embeddings, convolutions, losses and softmax."""

from typing import Any

import torch

from tapas._torch import pytree
from tapas.ir.custom_functions import Template, function_name
from tapas.ir.regions import Region, RegionResult, RegionSlot, Stage, Statements, register_region
from tests.oracle.case import Case, booleans, floats, integers, positive

SMALL = ((2,), (3,), (2, 2))


def norms() -> list[Case]:
    running = (torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64))
    odd = (floats(5), positive(5), floats(5), positive(5))
    # Statistics that are not used are empty: whether they are whole or partial sums is all the same.
    empty = frozenset(f"S({d}), B, B, B, B -> S({d}), P, P" for d in (0, 2))
    # The result does not show it, but running statistics are means over samples.
    averaged = frozenset({"S(0), B, B, B, B -> S(0)"})

    def batch(x: torch.Tensor, *rest: Any, **options: Any) -> Case:
        return Case("aten.batch_norm.default", (x, *rest), frozen=(3, 4), **options)

    return [
        Case("aten.layer_norm.default", (floats(4, 5, 6), (6,), floats(6), floats(6))),
        Case("aten.layer_norm.default", (floats(4, 5), (5,), floats(5)), {"eps": 1e-3}),
        Case("aten.layer_norm.default", (floats(4, 5, 6), (5, 6), None, floats(5, 6), 1e-3)),
        Case("aten.layer_norm.default", (floats(1, 7, 5), (5,))),
        Case("aten.layer_norm.default", (floats(8), (8,), floats(8), floats(8))),
        Case("aten.layer_norm.default", (floats(4, 6), (6,), floats(6), floats(6)), frozen=(0,)),
        Case("aten.native_layer_norm.default", (floats(4, 6), (6,), floats(6), floats(6), 1e-5)),
        Case("aten.rms_norm.default", (floats(4, 5, 6), (6,), floats(6), 1e-5)),
        Case("aten.rms_norm.default", (floats(4, 5), (5,))),
        Case("aten.rms_norm.default", (floats(2, 4, 5), (4, 5), floats(4, 5))),
        Case("aten._fused_rms_norm.default", (floats(4, 6), (6,), floats(6), 1e-5)),
        Case("aten.group_norm.default", (floats(2, 6, 4, 3), 3, floats(6), floats(6))),
        Case("aten.group_norm.default", (floats(3, 10, 4), 5, floats(10)), {"eps": 1e-3}),
        Case("aten.group_norm.default", (floats(5, 6), 2)),
        Case("aten.group_norm.default", (floats(2, 4, 5), 1, floats(4), floats(4))),
        batch(floats(4, 6, 3, 2), floats(6), floats(6), *running, True, 0.1, 1e-5, False),
        batch(floats(5, 5, 4), *odd, True, 0.1, 1e-5, True),
        batch(floats(4, 5, 2, 2), *odd, False, 0.1, 1e-5, True),
        batch(floats(6, 5), *odd, False, 0.1, 1e-5, True),
        Case("aten.batch_norm.default", (floats(6, 4), None, None, None, None, True, 0.1, 1e-5, True)),
        Case("aten.batch_norm.default", (floats(6, 5), *odd, True, 0.1, 1e-5, True), frozen=(0, 3, 4)),
        *(
            Case(f"aten.{name}.default", (floats(4, 5, 2), *odd, True, 0.1, 1e-5), frozen=(3, 4))
            for name in ("_native_batch_norm_legit", "_native_batch_norm_legit_functional", "native_batch_norm")
        ),
        Case(
            "aten._native_batch_norm_legit_functional.default", (floats(4, 5, 2), *odd, False, 0.1, 1e-5), frozen=(3, 4)
        ),
        *(
            Case(f"aten.{name}.default", (floats(4, 5, 2), *odd, False, 0.1, 1e-5), frozen=(3, 4), known=empty)
            for name in ("_native_batch_norm_legit", "native_batch_norm")
        ),
        Case(
            "aten.instance_norm.default", (floats(2, 5, 4, 3), floats(5), floats(5), None, None, True, 0.1, 1e-5, True)
        ),
        Case(
            "aten.instance_norm.default", (floats(4, 5, 6), *odd, True, 0.1, 1e-5, True), frozen=(3, 4), known=averaged
        ),
        Case("aten.instance_norm.default", (floats(4, 5, 6), *odd, False, 0.1, 1e-5, True), frozen=(3, 4)),
        Case(
            "tapas.batch_norm.default", (floats(4, 6, 3, 2), floats(6), floats(6), *running, True, 0.1, 1e-5, False),
            frozen=(3, 4),
        ),
        Case("tapas.batch_norm.default", (floats(5, 5, 4), *odd, True, 0.1, 1e-5, True), frozen=(3, 4)),
        Case("tapas.instance_norm.default", (floats(4, 5, 6), *odd, True, 0.1, 1e-5, True), frozen=(3, 4)),
    ]  # fmt: skip


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clamp(-1, 1), None


def functions() -> list[Case]:
    """Nobody knows what splits of a user's own function would work: it is not offered any."""
    x = floats(4, 6)
    everything = frozenset(("S(0) -> S(0)", "S(1) -> S(1)"))
    arguments = ([x], function_name(Rounded), str(Template.of((x, 4.0), {})))
    return [Case("tapas.function.default", arguments, known=everything), *_regions(x)]


def _regions(x: torch.Tensor) -> list[Case]:
    """Code that stays whole takes whole tensors only."""
    code = Statements("def region(x):\n    return x * 2 if x.sum() > -1e9 else -x", __name__, ("x",), None)
    flat, given = pytree.tree_flatten({"x": RegionSlot("tensor", 0)})
    result, returned = RegionResult(tuple(x.shape), x.dtype, True), pytree.tree_structure(x)
    region = Region(
        "here",
        code,
        Stage(()),
        tuple(flat),
        given,
        (),
        (),
        (),
        returned,
        (RegionSlot("tensor", 0),),
        (result,),
        (),
        False,
    )
    return [Case("tapas.region.default", ([x], register_region(region)))]


def softmaxes() -> list[Case]:
    return [
        Case("aten.softmax.int", (floats(4, 5, 6), -1)),
        Case("aten.softmax.int", (floats(4, 5), 0), {"dtype": torch.float64}),
        Case("aten.softmax.int", (floats(6), 0)),
        Case(
            "aten.softmax.int",
            (floats(4, 6).masked_fill(booleans(4, 6), -torch.inf).index_fill(1, torch.tensor([0]), 1), 1),
        ),
        Case("aten.softmax.int", (floats(4, 6), 1), frozen=(0,)),
        Case("aten._softmax.default", (floats(3, 4), 1, False)),
        Case("aten.log_softmax.int", (floats(4, 5, 6), 1)),
        Case("aten.log_softmax.int", (floats(1, 7), -1)),
        Case("aten._log_softmax.default", (floats(3, 4), 1, False)),
        Case("aten._safe_softmax.default", (floats(4, 6), -1)),
    ]


def attention() -> list[Case]:
    target = "aten.scaled_dot_product_attention.default"

    def qkv(*shape: int, heads: int | None = None, keys: int | None = None, wide: int | None = None):
        *lead, length, features = shape
        lead_kv = [*lead[:-1], heads] if heads else lead
        k = floats(*lead_kv, keys or length, features)
        return floats(*shape), k, floats(*lead_kv, keys or length, wide or features)

    def case(args: tuple, options: dict[str, Any] | None = None, **more: Any) -> Case:
        # Features of V may be split, but then every rank computes all scores again: not offered.
        dim = args[2].dim() - 1
        masks = [", B" for a in args[3:] if isinstance(a, torch.Tensor)]
        known = {f"B, B, S({dim}){''.join(masks)} -> S({dim})"} if args[2].shape[dim] % 2 == 0 else set()
        return Case(target, args, options or {}, known=frozenset(known), **more)

    def filled(queries: int, places: int) -> torch.Tensor:
        """Of a cache of so many places the first ones, for the last query one more; for the first query nothing, if
        there are several."""
        seen = torch.arange(queries)[:, None] + 2 * (queries == 1)
        return torch.arange(places) < seen

    def windowed(tensors: tuple, before: int, after: int, *scale: float) -> Case:
        features = case(tensors).known
        return Case("tapas.window_attention.default", (*tensors, before, after, *scale), known=features)

    return [
        case(qkv(5, 5, 5, 2)),
        case(qkv(2, 4, 6, 2, keys=5, wide=3)),
        case((*qkv(2, 4, 6, 2, keys=5), floats(2, 1, 6, 5)), {"scale": 0.3}),
        case((*qkv(2, 4, 6, 2, keys=5), floats(4, 1, 5))),
        case((*qkv(2, 4, 6, 2, keys=5), floats(6, 5))),
        case((*qkv(2, 4, 6, 2), torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()), {"dropout_p": 0.0}),
        case((*qkv(2, 4, 6, 2), None, 0.0, True)),
        case(qkv(1, 2, 5, 2, keys=3), {"is_causal": True}),
        case(qkv(1, 2, 3, 2, keys=6), {"is_causal": True}),
        case(qkv(3, 4, 2)),
        case(qkv(4, 2)),
        case(qkv(2, 8, 3, 2, heads=2), {"enable_gqa": True}),
        case(qkv(2, 6, 4, 2, heads=3), {"enable_gqa": True, "is_causal": True}),
        case(qkv(1, 10, 3, 2, heads=5), {"enable_gqa": True}),
        case(qkv(2, 6, 3, 2, heads=1), {"enable_gqa": True}),
        case(qkv(1, 4, 9, 2, heads=2, wide=3), {"enable_gqa": True, "is_causal": True, "scale": 0.7}),
        case(qkv(2, 3, 5, 2), {"is_causal": True}),
        case(qkv(2, 4, 3, 2, heads=4), {"enable_gqa": True}),
        case((*qkv(2, 8, 4, 2, heads=2), floats(2, 8, 4, 4)), {"enable_gqa": True}),
        case((*qkv(2, 8, 4, 2, heads=4), floats(2, 1, 4, 4)), {"enable_gqa": True}),
        # keys apart from queries, as those of a cache, of which some ranks have none that is looked at
        *[case((*tensors, mask), options, frozen=(0, 1, 2)) for tensors, mask, options in (
            (qkv(2, 4, 1, 2, keys=7, wide=3), None, {}), (qkv(5, 5, 3, 2, keys=8), filled(3, 8), {"scale": 0.3}),
            (qkv(2, 8, 2, 2, heads=2, keys=6), filled(2, 6)[None, None], {"enable_gqa": True}),
            (qkv(1, 10, 1, 2, heads=5, keys=9), filled(1, 9), {"enable_gqa": True}),
        )],
        case((*qkv(2, 4, 2, 3, keys=6), floats(2, 6).masked_fill(~filled(2, 6), -torch.inf)), frozen=(0, 1, 2, 3)),
        case(qkv(2, 4, 6, 2), {"dropout_p": 0.5}, exact=False),
        *[windowed(*given) for given in (
            (qkv(2, 4, 12, 2, wide=3), 2, 0), (qkv(3, 8, 4), 3, 1, 0.3), (qkv(2, 5, 7, 2), 1, 1),
            (qkv(1, 2, 8, 3), 1, 3), (qkv(12, 2), 3, 2), (qkv(2, 2, 5, 2), 6, 0),
        )],
    ]  # fmt: skip


def embeddings() -> list[Case]:
    target = "aten.embedding.default"
    bag = (floats(7, 4), integers(6, high=7), torch.tensor([0, 2, 5]))
    return [
        Case(target, (floats(7, 4), integers(2, 5, high=7))),
        Case(target, (floats(10, 3), integers(6, high=10), 4)),
        Case(target, (floats(5, 3), integers(2, 3, 2, high=5)), {"padding_idx": 1}),
        Case(target, (floats(5, 4), torch.tensor([1, 1, 2, 1]), -1, True)),
        Case(target, (floats(5, 4), torch.tensor(3))),
        Case("aten.embedding_bag.default", bag),
        Case("aten.embedding_bag.default", (*bag, False, 1)),
        Case("aten.embedding_bag.default", (*bag, False, 2)),
        Case("aten.embedding_bag.default", (*bag, False, 0, False, floats(6))),
        Case("aten.embedding_bag.padding_idx", (*bag, False, 0, False, None, False, 2)),
        Case("aten._embedding_bag.default", bag),
    ]


def convolutions() -> list[Case]:
    x, w = floats(5, 4, 5, 6), floats(6, 4, 3, 2)
    return [
        Case("aten.conv2d.default", (x, w, floats(6)), {"padding": (1, 1)}),
        Case("aten.conv2d.default", (x, w, None, (2, 2))),
        Case("aten.conv2d.default", (floats(4, 5, 6), w, floats(6))),
        Case("aten.conv2d.default", (floats(2, 5, 4, 4), floats(5, 1, 3, 3), floats(5), (1, 1), (1, 1), (1, 1), 5)),
        Case("aten.conv2d.default", (floats(2, 6, 3, 3), floats(4, 3, 2, 2), floats(4)), {"groups": 2}),
        Case("aten.conv2d.default", (floats(2, 3, 3, 3), floats(6, 1, 2, 2), None), {"groups": 3}),
        Case("aten.conv2d.default", (floats(2, 5, 3, 3), floats(5, 5, 1, 1), floats(5))),
        Case("aten.conv2d.default", (floats(2, 3, 6, 8), floats(4, 3, 3, 2), floats(4), (3, 2))),
        Case("aten.conv2d.default", (floats(2, 3, 4, 10), floats(4, 3, 4, 2), floats(4), (4, 2))),
        Case("aten.conv2d.padding", (x, floats(6, 4, 3, 1), floats(6)), {"padding": "same"}),
        Case("aten.conv1d.default", (floats(2, 4, 7), floats(6, 4, 3), floats(6))),
        Case("aten.conv1d.default", (floats(2, 4, 7), floats(4, 1, 3)), {"padding": (2,), "groups": 4}),
        Case("aten.conv1d.padding", (floats(2, 4, 7), floats(6, 4, 3), None, (1,), "valid")),
        Case("aten.conv3d.default", (floats(2, 4, 3, 3, 2), floats(2, 4, 2, 2, 2), floats(2))),
        Case("aten.conv3d.padding", (floats(2, 2, 3, 3, 2), floats(3, 2, 2, 2, 2)), {"padding": "valid"}),
        Case("aten.convolution.default", (x, w, floats(6), (1, 1), (1, 0), (1, 1), False, (0, 0), 1)),
        Case("aten.convolution.default", (x, floats(4, 3, 3, 2), None, (2, 2), (0, 0), (1, 1), True, (1, 1), 2)),
        Case("aten.conv_transpose1d.default", (floats(2, 4, 5), floats(4, 6, 3), floats(6))),
        Case("aten.conv_transpose2d.input", (x, floats(4, 3, 3, 2), floats(6)), {"groups": 2, "stride": (2, 1)}),
        Case("aten.conv_transpose3d.input", (floats(2, 2, 2, 3, 2), floats(2, 4, 2, 2, 2))),
        *halos(),
    ]


def halos() -> list[Case]:
    """Windows that reach over a rank's positions, and some that just do not."""
    conv, even = "aten.conv2d.default", floats(4, 2, 2, 3)
    one, three = (1, 1), floats(3, 2, 3, 3)
    return [
        Case(conv, (floats(1, 2, 12, 6), three, floats(3)), {"padding": (1, 1)}),
        Case(conv, (floats(2, 12, 6), three, floats(3), (1, 1), (1, 1))),
        Case(conv, (floats(1, 2, 24, 5), floats(3, 2, 7, 3), None, (2, 1), (3, 1))),
        Case(conv, (floats(2, 2, 24, 12), three, floats(3), (2, 2), (1, 1)), frozen=(0,)),
        Case(conv, (floats(1, 2, 12, 12), floats(3, 2, 9, 5), None, one, (4, 4), (1, 2))),
        Case(conv, (floats(1, 2, 24, 8), floats(3, 2, 1, 1), floats(3), (2, 2))),
        Case(conv, (floats(1, 4, 12, 4), floats(4, 1, 3, 3), floats(4), one, (2, 1), (2, 1), 4)),
        Case(conv, (floats(1, 4, 12, 6), floats(6, 2, 5, 3), None, one, (2, 0), one, 2)),
        Case(conv, (floats(1, 2, 12, 8), floats(4, 2, 3, 2), None, (1, 2), (1, 0))),
        Case("aten.conv2d.padding", (floats(1, 2, 12, 4), three, floats(3)), {"padding": "same"}),
        Case("aten.conv2d.padding", (floats(1, 2, 12, 4), floats(3, 2, 5, 1)), {"padding": "same", "dilation": (1, 3)}),
        Case("aten.conv2d.padding", (floats(1, 2, 4, 4), even), {"padding": "same"}),
        Case("aten.conv1d.default", (floats(2, 4, 24), floats(4, 2, 4), floats(4), (2,), (1,), (1,), 2)),
        Case("aten.conv1d.padding", (floats(2, 2, 12), floats(3, 2, 3), None, (1,), "same", (2,))),
        Case("aten.conv3d.default", (floats(1, 2, 4, 6, 4), floats(2, 2, 3, 3, 3), floats(2)), {"padding": (1, 1, 1)}),
        Case("aten.convolution.default",
             (floats(1, 2, 12, 4), three, floats(3), (1, 1), (1, 1), (1, 1), False, (0, 0), 1)),
        Case("aten.conv_transpose1d.default", (floats(2, 4, 6), floats(4, 6, 2), floats(6), (2,))),
        Case("aten.conv_transpose2d.input", (floats(1, 4, 6, 5), floats(4, 3, 2, 3), floats(3), (2, 3))),
        Case("aten.conv_transpose2d.input", (floats(1, 2, 6, 4), floats(2, 3, 4, 4), floats(3), (2, 2), (1, 1))),
        Case("aten.conv_transpose2d.input",
             (floats(1, 4, 12, 4), floats(4, 3, 3, 5), None, (2, 1), (1, 2), (1, 0), 2)),
        Case("aten.conv_transpose2d.input", (floats(1, 2, 6, 4), floats(2, 3, 2, 1), None, (3, 2), (0, 0), (1, 1))),
        Case("aten.conv_transpose1d.default", (floats(3, 2, 12), floats(2, 3, 3), None, (1,), (2,), (0,), 1, (2,))),
        Case("aten.conv_transpose1d.default", (floats(2, 24), floats(2, 3, 7), floats(3), (2,), (3,), (1,))),
        Case("aten.conv_transpose3d.input",
             (floats(1, 2, 4, 4, 3), floats(2, 2, 4, 4, 3), None, (2, 2, 1), (1, 1, 1))),
        Case("aten.convolution.default",
             (floats(1, 4, 6, 4), floats(4, 3, 2, 2), None, (2, 2), (0, 0), (1, 1), True, (0, 0), 1)),
        Case("aten.convolution.default",
             (floats(1, 4, 6, 4), floats(4, 3, 4, 3), None, (2, 2), (1, 1), (1, 1), True, (0, 1), 1)),
    ]  # fmt: skip


def pools_with_borders() -> list[Case]:
    x1, x2, x3 = floats(2, 3, 24), floats(1, 2, 24, 12), floats(1, 2, 4, 6, 4)
    half, around = ((2, 2), (1, 1)), ((1, 1), (1, 1))
    return [
        Case("aten.max_pool2d.default", (x2, (3, 3), *half)),
        Case("aten.max_pool2d.default", (floats(2, 12, 4), (3, 3), *around)),
        Case("aten.max_pool2d.default", (x2, (3, 1), (2, 2), (1, 0), (1, 1), True)),
        Case("aten.max_pool1d.default", (x1, (3,), (2,), (1,))),
        Case("aten.max_pool1d.default", (x1, (3,), (1,), (1,), (1,))),
        Case("aten.max_pool3d.default", (x3, (3, 3, 3), (1, 1, 1), (1, 1, 1))),
        Case("aten.avg_pool2d.default", (x2, (3, 3), *half)),
        Case("aten.avg_pool2d.default", (x2, (3, 3), *around, False, False)),
        Case("aten.avg_pool2d.default", (x2, (3, 3), *around, False, False, 5)),
        Case("aten.avg_pool1d.default", (x1, (5,), (1,), (2,))),
        Case("aten.avg_pool3d.default", (x3, (3, 3, 3), (1, 1, 1), (1, 1, 1))),
    ]


def multiplied() -> list[Case]:
    """Each position becomes two or three."""
    x1, x2, x3 = floats(2, 3, 12), floats(1, 2, 12, 6), floats(1, 2, 4, 6, 4)
    sizes = {"1d": (x1, (24,)), "2d": (x2, (24, 18)), "3d": (x3, (8, 6, 8))}
    near = [(f"upsample_nearest{n}", *of) for n, of in sizes.items()]
    near += [(f"_upsample_nearest_exact{n}", *of) for n, of in sizes.items()]
    kinds = {"linear1d": "1d", "bilinear2d": "2d", "bicubic2d": "2d", "trilinear3d": "3d"}
    return [
        *(Case(f"aten.{name}.default", (x, size)) for name, x, size in near),
        *(Case(f"aten.upsample_{kind}.default", (*sizes[n], False)) for kind, n in kinds.items()),
        Case("aten.upsample_nearest2d.vec", (x2, None, (2.0, 3.0))),
        Case("aten.upsample_nearest2d.vec", (x2, None, (2.1, 1.0))),
        Case("aten.upsample_nearest2d.default", (x2, (24, 12), 2.0, 2.1)),
        Case("aten.upsample_bilinear2d.vec", (x2, None, False, (2.0, 1.0))),
        Case("aten.upsample_bilinear2d.vec", (x2, (24, 12), True, None)),
        Case("aten.upsample_bilinear2d.vec", (x2, (24, 12), False, None)),
    ]


def pools() -> list[Case]:
    x3, x4, x5 = floats(2, 5, 6), floats(5, 5, 4, 6), floats(2, 3, 4, 4, 2)
    resized = [("1d", x3, (9,)), ("2d", x4, (7, 9)), ("3d", x5, (5, 6, 4))]
    linear = [
        ("linear1d", x3, (9,)),
        ("bilinear2d", x4, (7, 9)),
        ("bicubic2d", x4, (7, 9)),
        ("trilinear3d", x5, (5, 6, 4)),
    ]
    return [
        Case("aten.max_pool1d.default", (x3, (2,))),
        Case("aten.max_pool2d.default", (x4, (3, 3), (2, 2), (1, 1))),
        Case("aten.max_pool2d.default", (floats(5, 4, 6), (2, 2))),
        Case("aten.max_pool2d.default", (floats(3, 10, 4), (2, 2), (), (0, 0), (2, 1))),
        Case("aten.max_pool3d.default", (x5, (2, 2, 2))),
        Case("aten.max_pool2d_with_indices.default", (x4, (2, 2))),
        Case("aten.max_pool3d_with_indices.default", (x5, (2, 2, 2))),
        Case("aten.adaptive_max_pool1d.default", (x3, (2,))),
        Case("aten.adaptive_max_pool2d.default", (x4, (2, 2))),
        Case("aten.adaptive_max_pool3d.default", (x5, (2, 2, 2))),
        Case("aten.avg_pool1d.default", (x3, (2,))),
        Case("aten.avg_pool2d.default", (x4, (2, 2))),
        Case("aten.avg_pool3d.default", (x5, (2, 2, 2))),
        Case("aten.adaptive_avg_pool1d.default", (x3, (2,))),
        Case("aten.adaptive_avg_pool2d.default", (x4, (1, 1))),
        Case("aten.adaptive_avg_pool3d.default", (x5, (2, 2, 2))),
        Case("aten._adaptive_avg_pool2d.default", (x4, (2, 2))),
        Case("aten._adaptive_avg_pool3d.default", (x5, (2, 2, 2))),
        *(Case(f"aten.upsample_nearest{n}.default", (x, size), meshes=SMALL) for n, x, size in resized),
        *(Case(f"aten.upsample_nearest{n}.vec", (x, size, None), meshes=SMALL) for n, x, size in resized),
        *(Case(f"aten._upsample_nearest_exact{n}.default", (x, size), meshes=SMALL) for n, x, size in resized),
        *(Case(f"aten._upsample_nearest_exact{n}.vec", (x, size, None), meshes=SMALL) for n, x, size in resized),
        *(Case(f"aten.upsample_{n}.default", (x, size, False), meshes=SMALL) for n, x, size in linear),
        *(Case(f"aten.upsample_{n}.vec", (x, size, True, None), meshes=SMALL) for n, x, size in linear),
        *(Case(f"aten._upsample_{n}2d_aa.default", (x4, (7, 9), False), meshes=SMALL) for n in ("bilinear", "bicubic")),
        *(
            Case(f"aten._upsample_{n}2d_aa.vec", (x4, (7, 9), False, None), meshes=SMALL)
            for n in ("bilinear", "bicubic")
        ),
        Case("aten.grid_sampler.default", (x4, floats(5, 4, 5, 2), 0, 0, False)),
        Case("aten.grid_sampler_2d.default", (floats(2, 4, 3, 3), floats(2, 3, 4, 2), 0, 1, True)),
        Case("aten.im2col.default", (x4, (2, 2), (1, 1), (0, 0), (1, 1))),
        Case("aten.im2col.default", (floats(5, 4, 4), (2, 2), (1, 1), (0, 0), (1, 1))),
        Case("aten.col2im.default", (floats(4, 12, 9), (4, 4), (2, 2), (1, 1), (0, 0), (1, 1))),
        Case("aten.col2im.default", (floats(20, 4), (4, 4), (2, 2), (1, 1), (0, 0), (2, 2))),
        Case("aten.pixel_shuffle.default", (floats(2, 12, 3, 4), 2)),
        Case("aten.pixel_unshuffle.default", (floats(3, 4, 6), 2)),
        *pools_with_borders(),
        *multiplied(),
    ]


def losses() -> list[Case]:
    entropy, x, tokens = "aten.cross_entropy_loss.default", floats(6, 5), integers(6, high=5)
    ignored = tokens.clone()
    ignored[:4] = -100
    picture = (floats(2, 5, 3, 2), integers(2, 3, 2, high=5))
    weight = positive(5)
    soft = floats(6, 5).softmax(1)
    elementwise = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")
    pair = (positive(5, 4), positive(5, 4) / 2)
    share = (positive(5, 4) / 2, positive(5, 4) / 2)
    return [
        *(Case(entropy, (x, tokens, None, reduction)) for reduction in (0, 1, 2)),
        *(Case(entropy, (x, ignored, weight, r, -100, s), frozen=(1, 2)) for r in (0, 1, 2) for s in (0.0, 0.2)),
        *(Case(entropy, (*picture, None, r, 3, 0.1)) for r in (0, 1, 2)),
        Case(entropy, (*picture, weight), {"ignore_index": 1}, frozen=(2,)),
        Case(entropy, (x, tokens), {"label_smoothing": 0.3}),
        Case(entropy, (x * 500, tokens)),
        Case(entropy, (floats(6), torch.tensor(2)), {"reduction": 0}),
        Case(entropy, (floats(6), torch.tensor(2))),
        Case(entropy, (x, tokens), frozen=(0,)),
        *(Case(entropy, (x, soft, None, r)) for r in (0, 1, 2)),
        Case(entropy, (x, soft, weight, 1, -100, 0.2), frozen=(2,)),
        *(Case("aten.nll_loss_nd.default", (x, ignored, None, r)) for r in (0, 1, 2)),
        *(Case("aten.nll_loss_nd.default", (x, ignored, weight, r), frozen=(2,)) for r in (0, 1, 2)),
        Case("aten.nll_loss_nd.default", (*picture, weight), {"ignore_index": 1}, frozen=(2,)),
        Case("aten.nll_loss.default", (x, tokens)),
        Case("aten.nll_loss2d.default", picture),
        *(Case(f"aten.{name}.default", (*pair, r)) for name in elementwise for r in (0, 1, 2)),
        *(Case("aten.soft_margin_loss.default", (*pair, r), frozen=(1,)) for r in (0, 1, 2)),
        *(Case("aten.binary_cross_entropy.default", (*share, positive(4), r), frozen=(2,)) for r in (0, 1, 2)),
        Case("aten.binary_cross_entropy.default", share),
        *(
            Case(
                "aten.binary_cross_entropy_with_logits.default", (*pair, positive(5, 1), positive(4), r), frozen=(2, 3)
            )
            for r in (0, 1, 2)
        ),
        Case("aten.binary_cross_entropy_with_logits.default", pair),
        Case("aten.mse_loss.default", (floats(5, 4), floats(5, 1)), {"reduction": 0}, frozen=(1,)),
        Case("aten.mse_loss.default", (floats(), floats())),
    ]


def _weights(gates: int, inner: int, hidden: int, many: int = 1, bias: bool = True, proj: int = 0) -> tuple:
    """Of `many` layers and directions, the first of which reads `inner` features."""
    rows, found = gates * hidden, []
    for _ in range(many):
        found += [floats(rows, inner), floats(rows, proj or hidden)]
        found += [floats(rows), floats(rows)] if bias else []
        found += [floats(proj, hidden)] if proj else []
    return tuple(found)


def recurrent() -> list[Case]:
    def state(many: int = 1, hidden: int = 5, batch: int = 7) -> torch.Tensor:
        return floats(many, batch, hidden)

    turned, straight = (floats(7, 3, 9), floats(3, 7, 9))
    two = (*_weights(4, 9, 5, 2), *_weights(4, 10, 5, 2))
    deep, projected = (*_weights(4, 9, 5), *_weights(4, 5, 5)), _weights(4, 9, 5, proj=3)
    plain = (True, 1, 0.0, True, False)
    return [
        Case("aten.lstm.input", (turned, (state(), state()), _weights(4, 9, 5), *plain, True)),
        Case("aten.lstm.input", (straight, (state(), state()), _weights(4, 9, 5), *plain, False)),
        Case("aten.lstm.input", (turned, (state(4), state(4)), two, True, 2, 0.0, True, True, True), meshes=SMALL),
        Case("aten.lstm.input", (turned, (state(1, 3), state()), projected, *plain, True), meshes=SMALL),
        Case("aten.lstm.input", (turned, (state(2), state(2)), deep, True, 2, 0.5, True, False, True), exact=False),
        Case("aten.gru.input", (turned, state(), _weights(3, 9, 5, bias=False), False, 1, 0.0, True, False, True)),
        Case("aten.gru.input", (straight, state(2), _weights(3, 9, 5, 2), True, 1, 0.0, False, True, False)),
        Case("aten.rnn_tanh.input", (turned, state(), _weights(1, 9, 5), *plain, True), frozen=(1,)),
        Case("aten.rnn_relu.input", (straight, state(), _weights(1, 9, 5), *plain, False)),
        Case("aten.lstm_cell.default", (floats(7, 9), (floats(7, 5), floats(7, 5)), *_weights(4, 9, 5))),
        Case("aten.gru_cell.default", (floats(7, 9), floats(7, 5), *_weights(3, 9, 5))),
        Case("aten.rnn_tanh_cell.default", (floats(7, 9), floats(7, 5), *_weights(1, 9, 5))),
        Case("aten.rnn_relu_cell.default", (floats(7, 9), floats(7, 5), *_weights(1, 9, 5, bias=False))),
    ]


CASES = [
    *norms(), *functions(), *softmaxes(), *attention(), *embeddings(), *convolutions(), *pools(), *losses(),
    *recurrent(),
]  # fmt: skip
