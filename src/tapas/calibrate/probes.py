"""What is measured of each family of operators: small modules, whose operators are priced as those of any model.

All that a probe reads are its parameters, so that every operand has a gradient, as in the middle of a model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tapas.capture import capture
from tapas.cost.kernels import Work, whole_work
from tapas.rules.base import Call, rule_for

Shape = tuple[int, ...]


class Applied(nn.Module):
    """A function of parameters, and of indices below a bound if there are some."""

    def __init__(self, probe: "Probe", dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        made = [torch.randn(shape, dtype=dtype, device=device) / 4 for shape in probe.shapes]
        self.operands = nn.ParameterList(made)
        self.function, self.indexed = probe.function, probe.indices is not None
        if probe.indices is not None:
            shape, bound = probe.indices
            self.register_buffer("indices", torch.randint(0, bound, shape, device=device))

    def forward(self) -> torch.Tensor:
        return self.function(*self.operands, *([self.indices] if self.indexed else []))


@dataclass(frozen=True)
class Probe:
    family: str
    name: str
    function: Callable[..., torch.Tensor]
    shapes: tuple[Shape, ...]
    indices: tuple[Shape, int] | None = None
    narrow: bool = field(default=False)  # sizes that no kernel likes: for what these cost, not for the peak
    dtype: torch.dtype | None = None  # instead of the one that is measured

    @property
    def title(self) -> str:
        return f"{self.name} {', '.join(' x '.join(map(str, shape)) for shape in self.shapes)}"

    def module(self, dtype: torch.dtype, device: torch.device) -> Applied:
        torch.manual_seed(0)
        return Applied(self, self.dtype or dtype, device)

    def work(self, module: Applied) -> list[Work]:
        """What the cost model sees of it."""
        graph = capture(module, (), training=True, name=self.name)
        calls = [Call.of(op, graph.tensors) for op in graph.ops]
        return [whole_work(call, rule_for(call)) for call in calls]


@dataclass(frozen=True)
class Sizes:
    """Large enough to fill a device, small enough to be measured in a minute."""

    rows: int  # of matrices
    widths: Sequence[int]
    lengths: Sequence[int]  # of sequences
    classes: int
    image: int  # height and width
    elements: Sequence[int]  # of what is only read and written


CPU = Sizes(512, (64, 256, 1024), (64, 256), 4096, 28, (1 << 18, 1 << 21))
GPU = Sizes(8192, (256, 1024, 4096), (256, 1024, 4096), 32768, 56, (1 << 24, 1 << 27))


def probes(sizes: Sizes) -> Iterator[Probe]:
    yield from _products(sizes)
    yield from _experts(sizes)
    yield from _attentions(sizes)
    for elements in sizes.elements:
        yield from _passes(elements, sizes.widths[1])
        yield from _casts(elements, sizes.widths[1])
    yield from _others(sizes)


def _products(sizes: Sizes) -> Iterator[Probe]:
    rows, widths = sizes.rows, sizes.widths
    for width in widths:
        for depth in {width, widths[-1]}:
            yield Probe("matmul", "linear", F.linear, ((rows, depth), (width, depth)))
    middle = widths[1]
    yield Probe("matmul", "linear", F.linear, ((rows, middle), (sizes.classes - 2, middle)), narrow=True)
    yield Probe("matmul", "linear", F.linear, ((rows, middle), (sizes.classes - 1, middle)), narrow=True)


def _experts(sizes: Sizes) -> Iterator[Probe]:
    """Every token passes through two of them."""
    rows, (_, hidden, wide), count = sizes.rows, sizes.widths, 4
    for width in (wide // 4, wide // 2):
        shapes = (rows, hidden), (rows, 2), (count, 2 * width, hidden), (count, hidden, width)
        yield Probe("grouped_matmul", "experts", _mixed, shapes, ((rows, 2), count))


def _attentions(sizes: Sizes) -> Iterator[Probe]:
    for length in sizes.lengths:
        for head in (32, 64, 128):
            heads = max(sizes.widths[-1] // head // 2, 1)
            batch = max(sizes.lengths[-1] // length, 1)
            shape = (batch, heads, length, head)
            yield Probe("attention", "causal attention", _causal, (shape, shape, shape))
    length, heads = sizes.lengths[-1] // 2, max(sizes.widths[-1] // 128, 1)
    shape = (2, heads, length, 64)
    yield Probe(
        "unfused_attention", "attention with a bias", _biased, (shape, shape, shape, (1, heads, length, length))
    )


def _passes(elements: int, width: int) -> Iterator[Probe]:
    """What reads and writes once."""
    shape = (elements // width, width)
    yield Probe("pointwise", "multiply", torch.mul, (shape, shape))
    yield Probe("pointwise", "silu", F.silu, (shape,))
    yield Probe("strided", "transpose", lambda x: x.t().contiguous(), (shape,))
    yield Probe("concatenation", "concatenation", lambda x, y: torch.cat([x, y], -1), (shape, shape))
    yield Probe("reduction", "mean", lambda x: x.mean(-1, keepdim=True), (shape,))
    yield Probe("norm", "layer norm", _layer_norm, (shape, (width,), (width,)))
    yield Probe("norm", "rms norm", _rms_norm, (shape, (width,)))
    yield Probe("softmax", "softmax", lambda x: torch.softmax(x, -1), (shape,))


def _casts(elements: int, width: int) -> Iterator[Probe]:
    """Between these two dtypes, whichever one is measured; the way back is the gradient's."""
    shape, wide, narrow = (elements // width, width), torch.float32, torch.bfloat16
    yield Probe("widening", "to float32", lambda x: x.to(wide), (shape,), dtype=narrow)
    yield Probe("narrowing", "to bfloat16", lambda x: x.to(narrow), (shape,), dtype=wide)


def _others(sizes: Sizes) -> Iterator[Probe]:
    width, classes, image = sizes.widths[1], sizes.classes, sizes.image
    tokens = sizes.rows
    yield Probe("cross_entropy", "cross-entropy", F.cross_entropy, ((tokens, classes),), ((tokens,), classes))
    yield Probe("embedding", "embedding", lambda w, i: F.embedding(i, w), ((classes, width),), ((tokens,), classes))
    yield Probe("index", "index", lambda x, i: x[i], ((tokens, width),), ((tokens,), tokens))
    yield Probe("sort", "top-k", lambda x: torch.topk(x, 2, dim=-1)[0], ((16 * tokens, 64),))
    channels = width // 4
    pictures = (8, channels, image, image)
    for inside in (channels, channels // 4):
        shapes = (8, inside, image, image), (channels, inside, 3, 3)
        yield Probe("convolution", "convolution", lambda x, w: F.conv2d(x, w, padding=1), shapes)
    yield Probe("batch_norm", "batch norm", _batch_norm, (pictures, (channels,), (channels,)))


def _mixed(x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor, index: torch.Tensor) -> Any:
    """Graphs say the operator, programs call the one that keeps what its backward pass needs."""
    from tapas.ir import custom_ops  # registers them

    captured = torch.compiler.is_exporting()
    call = custom_ops.experts if captured else torch.ops.tapas.experts_kept
    return call(x, index, weight, up, down, "silu")


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, bias)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight)


def _batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)
