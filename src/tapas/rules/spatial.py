"""Pictures: convolutions, pooling, resizing and sampling. Positions are dealt out where windows lie side by side, as in
the patches of a vision transformer, and where they reach over to the neighbours (windows.py)."""

import re
from collections.abc import Callable
from typing import Any

from tapas.rules.base import Call, Halo, Kernel, Rule, RuleFunction, Wording, rule
from tapas.rules.notation import Term, einsum, from_labels, number, override, placed
from tapas.rules.windows import HALO_WORDS, NAMES, Reach, Step, following, looks_at, windows_of, with_borders

WORDS = {"o": "output channels", "i": "input channels", "g": "channel groups", "c": "channels", "n": "batch"}


def _pictures(*targets: str) -> Callable[[RuleFunction], RuleFunction]:
    """A rule, with words for the positions of as many dims as there are in each operator's name."""

    def register(function: RuleFunction) -> RuleFunction:
        for target in targets:
            positions = {f"p{i}": name for i, name in enumerate(NAMES.get(_spatial(target), ()))}
            rule(target, wording=Wording(factors=WORDS | positions, joint=HALO_WORDS))(function)
        return function

    return register


def _spatial(target: str) -> int:
    """`aten.max_pool2d_with_indices.default` -> 2; 0 where any number will do."""
    digit = re.search(r"(\d)d", target)
    return int(digit[1]) if digit else 0


@_pictures("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default",
           "aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding")  # fmt: skip
def conv(call: Call) -> Rule:
    steps = call.arg(3, "stride", 1), call.arg(4, "padding", "valid" if "padding" in call.target else 0)
    return _convolution(call, call.arg(6, "groups", 1), *steps, call.arg(5, "dilation", 1))


@_pictures("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def conv_transpose(call: Call) -> Rule:
    steps = call.arg(3, "stride", 1), call.arg(4, "padding", 0), call.arg(7, "dilation", 1)
    return _convolution(call, call.arg(6, "groups", 1), *steps, transposed=True)


@_pictures("aten.convolution.default")
def convolution(call: Call) -> Rule:
    stride, padding, dilation = (call.arg(i, name) for i, name in ((3, "stride"), (4, "padding"), (5, "dilation")))
    return _convolution(call, call.arg(8, "groups"), stride, padding, dilation, call.arg(6, "transposed"))


def _convolution(
    call: Call, groups: int, stride: Step = 1, padding: Step | str = 0, dilation: Step = 1, transposed: bool = False
) -> Rule:
    """Work is counted per window: at every position of the result, or of the input if transposed."""
    x, weight, bias = (number(call, i, name) for i, name in enumerate(("input", "weight", "bias")))
    assert x is not None and weight is not None
    shape = call.operands[weight].shape
    spatial = range(len(shape) - 2)
    batch: Term = [["n"]] if len(call.operands[x].shape) == len(shape) else []
    window: Term = [[f"!k{i}"] for i in spatial]
    out: Term = [[f"!p{i}"] for i in spatial]
    into: Term = [["1"] for _ in spatial]
    whole, made = call.operands[x].shape[-len(spatial) :], call.results[0].shape[-len(spatial) :]
    windows = windows_of(shape[2:], stride, padding, dilation, len(spatial))
    reaching = following(windows, padding, whole, made, transposed)
    for i, found in enumerate(windows):
        if i in reaching:
            out[i] = [reaching[i]]
        elif not transposed and found.tiles(whole[i], made[i]):
            # A single window may itself be cut: then it is one more dim that is summed over.
            window[i] = [f"k{i}" if made[i] == 1 else f"!k{i}"]
            into[i], out[i] = [f"p{i}", *window[i]], [f"p{i}"]
        elif transposed and found.tiles(made[i], whole[i]):
            out[i], into[i] = [f"p{i}"], [f"p{i}", f"!k{i}"]
    if transposed:
        into, out = out, into
    operands = placed(
        call,
        (0, "input", [*batch, ["g", "i"], *into]),
        (1, "weight", [["g", "i"], ["o"], *window] if transposed else [["g", "o"], ["i"], *window]),
        (2, "bias", [["g", "o"]]),
    )
    inner = shape[0] // groups
    sizes = {"g": groups, "i": inner if transposed else shape[1], "o": shape[1] if transposed else inner}
    # The bias is added once: where the sum is split, it is a partial sum as well.
    summed = Kernel(operands=override(call, bias, "P"))
    kernels = {"g": Kernel(), "o": Kernel(), "i": summed}
    kernels |= {f"p{i}": Kernel() for i in spatial} | {f"k{i}": summed for i in spatial}
    linear = ((x,) if bias is None else (x, bias),)
    plain = from_labels(
        operands, [[*batch, ["g", "o"], *out]], call, sizes, kernels, flops=2.0, linear=linear,
        products=("aten.convolution.default", "tapas.exchange.default"), kernel="products.convolution",
        family="convolution", added=bias, channels=0 if transposed else 1,
    )  # fmt: skip
    first = len(batch) + 1
    where = {name: windows[i].reach(first + i, transposed) for i, name in reaching.items()}
    return with_borders(call, plain, x, where, saved=True, kept=True, cut=transposed)


# ---------------------------------------------------------------------------------------------
# Pooling, resizing and sampling: every channel of every sample by itself

PLACE_BYTES = 8  # pooling remembers where it found the largest
KERNELS = {"n": Kernel(), "c": Kernel()}  # these operators refuse tensors without channels


def _channelwise(
    call: Call, spatial: int, linear: bool, taken: Term | None = None, made: Term | None = None,
    sizes: dict[str, int] | None = None, kernel: str = "products.channelwise", **options: Any,
) -> Rule:  # fmt: skip
    """`taken` and `made`: labels of the spatial dims of operand and results."""
    lead: Term = [[label] for label in ["n", "c"][2 - (call.rank - spatial) :]]
    whole: Term = [["1"]] * spatial
    kernels = KERNELS | {label[0]: Kernel() for label in made or ()}
    options |= {"kernel": kernel, "linear": ((0,),) if linear else ()}
    results = [[*lead, *(made or whole)]] * len(call.results)
    return from_labels([[*lead, *(taken or whole)]], results, call, sizes, kernels, **options)


def _pool(call: Call, linear: bool, dilation: Step = 1, fills: bool = True, **options: Any) -> Rule:
    """`fills`: what lies beyond the ends counts as if it were there."""
    spatial = _spatial(call.target)
    size, stride, padding = call.arg(1, "kernel_size"), call.arg(2, "stride", ()), call.arg(3, "padding", 0)
    windows = windows_of(size, stride or size, padding, dilation, spatial)
    whole, made = (t.shape[-spatial:] for t in (call.operands[0], call.results[0]))
    taken: Term = [["1"] for _ in range(spatial)]
    out, sizes = list(taken), dict[str, int]()
    names = {i: name for i, name in following(windows, padding, whole, made).items() if fills or not windows[i].padding}
    for i, window in enumerate(windows):
        if window.tiles(whole[i], made[i]):
            taken[i], out[i], sizes[f"k{i}"] = [f"p{i}", f"!k{i}"], [f"p{i}"], window.size
        elif i in names:
            out[i] = [names[i]]
    plain = _channelwise(call, spatial, linear, taken, out, sizes, "halo.pool", **options)
    first = call.rank - spatial
    return with_borders(call, plain, 0, {n: windows[i].reach(first + i) for i, n in names.items()}, saved=True)


@_pictures(
    "aten.max_pool1d.default", "aten.max_pool2d.default", "aten.max_pool3d.default",
    "aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default",
    "aten.adaptive_max_pool1d.default", "aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default",
)  # fmt: skip
def max_pool(call: Call) -> Rule:
    if len(call.results) > 1:  # indices are places in the whole picture
        return _channelwise(call, _spatial(call.target), linear=False, saved_bytes=PLACE_BYTES)
    return _pool(call, False, call.arg(4, "dilation", 1), saved_bytes=PLACE_BYTES)


@rule(
    "aten.adaptive_avg_pool1d.default", "aten.adaptive_avg_pool2d.default", "aten.adaptive_avg_pool3d.default",
    "aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default",
)  # fmt: skip
def adaptive_avg_pool(call: Call) -> Rule:
    return _channelwise(call, _spatial(call.target), linear=True)


@_pictures("aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default")
def avg_pool(call: Call) -> Rule:
    counted = call.arg(5, "count_include_pad", True) or call.arg(6, "divisor_override") is not None
    return _pool(call, True, fills=counted)


_RESIZED = ("nearest1d", "nearest2d", "nearest3d", "_nearest_exact1d", "_nearest_exact2d", "_nearest_exact3d",
            "linear1d", "bilinear2d", "bicubic2d", "trilinear3d", "_bilinear2d_aa", "_bicubic2d_aa")  # fmt: skip


def _resized(name: str) -> str:
    return f"aten._upsample{name}" if name.startswith("_") else f"aten.upsample_{name}"


@_pictures(*(f"{_resized(name)}.{overload}" for name in _RESIZED for overload in ("default", "vec")))
def upsample(call: Call) -> Rule:
    """Positions are dealt out where each one becomes so many, all of them from it and from those beside it."""
    spatial, near = call.rank - 2, looks_at(call.target)
    taken: Term = [["1"] for _ in range(spatial)]
    out, sizes, found = list(taken), dict[str, int](), dict[str, Reach]()
    for i, times in enumerate(_times(call)):
        if near is None or not times or (near and call.arg(2, "align_corners")):
            continue
        name = NAMES[spatial][i] if near and times > 1 else f"p{i}"
        if near and times > 1:
            found[name] = Reach(2 + i, 1, times, Halo(near, near))
        taken[i], out[i], sizes[f"t{i}"] = [name], [name, f"!t{i}"], times
    plain = _channelwise(call, spatial, True, taken, out, sizes, "halo.resize")
    return with_borders(call, plain, 0, found, saved=False, cut=True)


def _times(call: Call) -> list[int]:
    """How many positions each one becomes, by dim; 0 where that is no whole number, or another one is given."""
    spatial, kind = call.rank - 2, call.target.split(".")[2]
    whole, made = (t.shape[-spatial:] for t in (call.operands[0], call.results[0]))
    first = 2 if "nearest" in call.target else 3
    names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}[spatial]
    given = [call.arg(first + i, name) for i, name in enumerate(names)]
    if kind == "vec":
        given = call.arg(first, "scale_factors") or [None] * spatial
    return [
        of // size if size and of % size == 0 and scale in (None, of // size) else 0
        for size, of, scale in zip(whole, made, given, strict=True)
    ]


@rule("aten.grid_sampler.default", "aten.grid_sampler_2d.default")
def grid_sampler(call: Call) -> Rule:
    """Positions to sample at may be split as well: each looks at the whole picture."""
    spatial = call.rank - 2
    out: Term = [[f"s{i}"] for i in range(spatial)]
    operands = [[["n"], ["c"], *[["1"]] * spatial], [["n"], *out, ["1"]]]
    return from_labels(
        operands, [[["n"], ["c"], *out]], call, linear=((0,),), kernels=KERNELS, kernel="products.channelwise"
    )


@rule("aten.im2col.default")
def im2col(call: Call) -> Rule:
    if call.rank == 3:
        window = call.results[0].shape[0] // call.operands[0].shape[0]
        return einsum("c 1 1 -> (c !k) 1", call, {"k": window}, linear=((0,),))
    window = call.results[0].shape[1] // call.operands[0].shape[1]
    return einsum("n c 1 1 -> n (c !k) 1", call, {"k": window}, linear=((0,),))


@rule("aten.col2im.default")
def col2im(call: Call) -> Rule:
    """Patches of every channel are added up where they overlap."""
    channel = call.rank - 2
    window = call.operands[0].shape[channel] // call.results[0].shape[channel]
    spelling = "(c !k) 1 -> c 1 1" if call.rank == 2 else "n (c !k) 1 -> n c 1 1"
    return einsum(spelling, call, {"k": window}, linear=((0,),))


@rule("aten.pixel_shuffle.default", "aten.pixel_unshuffle.default")
def pixel_shuffle(call: Call) -> Rule:
    """Channels become positions, or the other way round."""
    lead: Term = [[f"d{i}"] for i in range(call.rank - 3)]
    deep: Term = [*lead, ["c", "!a", "!b"], ["y"], ["x"]]
    flat: Term = [*lead, ["c"], ["y", "!a"], ["x", "!b"]]
    size = call.arg(1, "upscale_factor", call.arg(1, "downscale_factor"))
    operands, results = (deep, flat) if "unshuffle" not in call.target else (flat, deep)
    small = call.operands[0].shape if operands is deep else call.results[0].shape
    sizes = {"a": size, "b": size, "c": small[-3] // size**2, "y": small[-2], "x": small[-1]}
    return from_labels([operands], [results], call, sizes, linear=((0,),))
