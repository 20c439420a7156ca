"""Convolutions: samples, channels out, channels in (a partial sum), groups. Positions stay whole, except
those of windows that lie side by side, as in the patches of a vision transformer."""

from collections.abc import Sequence

from tapas.rules.base import Call, Kernel, Rule, Wording, rule
from tapas.rules.notation import Term, from_labels, number, override, placed

WORDS = Wording(factors={"o": "output channels", "i": "input channels", "g": "channel groups", "n": "batch"})
Step = int | tuple[int, ...]


def side_by_side(
    window: Sequence[int], whole: Sequence[int], made: Sequence[int], stride: Step, padding: Step | str, dilation: Step
) -> list[int]:
    """The spatial dims that windows divide without overlap, gap or margin."""

    def at(value: Step | str, i: int) -> int | str:
        return value[min(i, len(value) - 1)] if isinstance(value, tuple) else value

    def fits(i: int, size: int) -> bool:
        tight = at(padding, i) in (0, "valid") and at(dilation, i) == 1
        alone = size == 1 and at(padding, i) in (0, "valid", "same")
        return (tight or alone) and (at(stride, i) == size or made[i] == 1) and made[i] * size == whole[i]

    return [i for i, size in enumerate(window) if fits(i, size)]


@rule(
    "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default",
    "aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding", wording=WORDS,
)  # fmt: skip
def conv(call: Call) -> Rule:
    steps = call.arg(3, "stride", 1), call.arg(4, "padding", "valid" if "padding" in call.target else 0)
    return _convolution(call, call.arg(6, "groups", 1), *steps, call.arg(5, "dilation", 1))


@rule("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def conv_transpose(call: Call) -> Rule:
    return _convolution(call, call.arg(6, "groups", 1), transposed=True)


@rule("aten.convolution.default", wording=WORDS)
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
    if transposed:
        into, out = out, into
    else:
        whole, made = call.operands[x].shape[-len(spatial) :], call.results[0].shape[-len(spatial) :]
        for i in side_by_side(shape[2:], whole, made, stride, padding, dilation):
            # A single window may itself be cut: then it is one more dim that is summed over.
            window[i] = [f"k{i}" if made[i] == 1 else f"!k{i}"]
            into[i], out[i] = [f"p{i}", *window[i]], [f"p{i}"]
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
    return from_labels(
        operands, [[*batch, ["g", "o"], *out]], call, sizes, kernels, flops=2.0, linear=linear,
        products=("aten.convolution.default",), kernel="products.convolution",
    )  # fmt: skip
