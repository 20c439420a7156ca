"""Operators of our own: experts of a mixture, products with a bias, and norms that return their running statistics.

Written out, a mixture-of-experts layer is a sort, a gather, grouped products and a scatter whose sizes
depend on data. As one operator it has plain factors (tokens, experts, the experts' inner dim), and a
rank that holds some of the experts calls it with shifted indices: slots out of range are skipped.

GPT-2 multiplies by weights of [inputs, outputs] and adds a bias, in one kernel for rows of a matrix. Torch has no such
operator for tensors of more dims, and merged dims cannot be split.

Torch's norms write to their running statistics in passing, which no schema tells. Ours return what these are
afterwards, so that the values have layouts like any other, and computing a block again does not move them twice.

Masks of sliding windows are tensors as large as all pairs of positions. Attention with one says how far it looks.

A cache is a buffer of [batch, heads, places, features] that one operator of a model writes to, or reads.
"""

# torch gives its decorators no types.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tapas.ir import expert_layer
from tapas.ir.expert_layer import ExpertLayer
from tapas.ir.gating import gating_of

_library = torch.library.Library("tapas", "FRAGMENT")

# ---------------------------------------------------------------------------------------------
# Experts


@torch.library.custom_op("tapas::experts", mutates_args=())
def experts(
    hidden: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gating: str,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, capacity: float | None = None,
) -> Tensor:  # fmt: skip
    """Sum over a token's slots of weight * down(act(gate(x)) * up(x)) of the slot's expert.

    hidden [T, h], index and weight [T, k], gate_up [E, 2f, h], down [E, h, f], biases [E, 2f] and [E, h]; `gating` says
    what else there is between the products, and whether weights are transposed (ir/gating.py). `capacity` has no say in
    what is computed: it is for ranks that send tokens to each other. This is what graphs say; programs call
    `experts_kept`, which computes the same and keeps what the backward pass needs.
    """
    return experts_forward(hidden, index, weight, gate_up, down, gating, gate_up_bias, down_bias)[0]


@experts.register_fake
def _(hidden: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(hidden)


@torch.library.custom_op("tapas::experts_forward", mutates_args=())
def experts_forward(
    hidden: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gating: str,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """And gate and up of every slot."""
    return expert_layer.forward(_layer(hidden, index, weight, gate_up, down, gating, gate_up_bias, down_bias))


def _layer(
    hidden: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, words: str, *biases: Tensor | None
) -> ExpertLayer:
    gating = gating_of(words)
    if gating.transposed:
        gate_up, down = gate_up.mT, down.mT
    return ExpertLayer(hidden, index, weight, gate_up, down, gating, *biases)


@experts_forward.register_fake
def _(
    hidden: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gating: str,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    features = gate_up.shape[2 if gating_of(gating).transposed else 1]
    return torch.empty_like(hidden), gate_up.new_empty((index.numel(), features))


@torch.library.custom_op("tapas::experts_backward", mutates_args=())
def experts_backward(
    grad: Tensor, hidden: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, kept: Tensor,
    gating: str, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of hidden, weight, gate_up and down, and of the biases if there are any."""
    layer = _layer(hidden, index, weight, gate_up, down, gating, gate_up_bias, down_bias)
    of_hidden, of_weight, *others = expert_layer.backward(grad, layer, kept)
    if layer.gating.transposed:
        others[:2] = (x.mT.contiguous() for x in others[:2])
    return [of_hidden, of_weight, *others]


@experts_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, kept: Tensor,
    gating: str, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x) for x in (hidden, weight, gate_up, down, gate_up_bias, down_bias) if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *inputs[6:], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.gating = inputs[5]


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *operands, gate_up_bias, down_bias, kept = ctx.saved_tensors
    return _gradients(experts_backward(grad.contiguous(), *operands, kept, ctx.gating, gate_up_bias, down_bias))


def _gradients(found: list[Tensor]) -> tuple[Tensor | None, ...]:
    """For every argument of the forward pass."""
    hidden, weight, gate_up, down, *of_biases = found
    return hidden, None, weight, gate_up, down, None, *(of_biases or (None, None))


experts_forward.register_autograd(_backward, setup_context=_keep)


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5], *inputs[6:8])
    ctx.gating = inputs[5]


def _forward_and_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *operands, gate_up_bias, down_bias = ctx.saved_tensors
    biases = gate_up_bias, down_bias
    kept = experts_forward(*operands, ctx.gating, *biases)[1]
    return *_gradients(experts_backward(grad.contiguous(), *operands, kept, ctx.gating, *biases)), None


experts.register_autograd(_forward_and_backward, setup_context=_keep_operands)


def _kept(
    hidden: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gating: str,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, capacity: float | None = None,
) -> Tensor:  # fmt: skip
    return experts_forward(hidden, index, weight, gate_up, down, gating, gate_up_bias, down_bias)[0]


_library.define(
    "experts_kept(Tensor hidden, Tensor index, Tensor weight, Tensor gate_up, Tensor down, str gating, "
    "Tensor? gate_up_bias=None, Tensor? down_bias=None, float? capacity=None) -> Tensor"
)
_library.impl("experts_kept", _kept, "CompositeImplicitAutograd")


# ---------------------------------------------------------------------------------------------
# Caches. A graph knows no writing: here a cache is made anew. Programs write into it, and every rank holds of it what
# the operator reads there, in the layout that the plan chose for that.


@torch.library.custom_op("tapas::write_cache", mutates_args=())
def write_cache(cache: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """The cache with rows [b, h, k, e] at these places [k]."""
    return cache.index_copy(2, places, rows)


@write_cache.register_fake
def _(cache: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return torch.empty_like(cache, memory_format=torch.contiguous_format)


@torch.library.custom_op("tapas::read_cache", mutates_args=())
def read_cache(cache: Tensor, places: Tensor) -> Tensor:
    """The cache as it is when these places are computed: another program has written to it."""
    return cache.clone()


@read_cache.register_fake
def _(cache: Tensor, places: Tensor) -> Tensor:
    return torch.empty_like(cache, memory_format=torch.contiguous_format)


def _written(cache: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return cache.index_copy_(2, places, rows)


def _as_it_is(cache: Tensor, places: Tensor) -> Tensor:
    return cache


# by target: what programs call
CACHES: dict[str, Callable[..., Tensor]] = {
    "tapas.write_cache.default": _written,
    "tapas.read_cache.default": _as_it_is,
}


# ---------------------------------------------------------------------------------------------
# Operators made of torch's own, which autograd looks into

COMPOSITES: dict[str, Callable[..., Any]] = {}  # by target: programs call them without torch's dispatcher in between


def _composite(schema: str, function: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeImplicitAutograd")
    COMPOSITES[f"tapas.{name}.default"] = function


def affine(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """input @ weight + bias in one kernel, for rows of any number of dims."""
    rows = torch.addmm(bias, input.flatten(0, -2), weight)
    return rows.view(*input.shape[:-1], weight.shape[1])


_composite("affine(Tensor input, Tensor weight, Tensor bias) -> Tensor", affine)


def attention_within(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, places: Tensor, before: int, after: int,
    scale: float | None, there: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Queries of some rows of a sequence look at those keys, of some places, that are within reach."""
    mask = places > (rows - (before + 1)).unsqueeze(1)  # of pairs there are many: no more than a byte for each
    mask &= places <= (rows + after).unsqueeze(1)
    if there is not None:
        mask &= there
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def _window_attention(
    query: Tensor, key: Tensor, value: Tensor, before: int, after: int, scale: float | None = None
) -> Tensor:
    places = torch.arange(query.shape[-2], device=query.device)
    return attention_within(query, key, value, places, places, before, after, scale)


_composite(
    "window_attention(Tensor query, Tensor key, Tensor value, int before, int after, float? scale=None) -> Tensor",
    _window_attention,
)

_ARGUMENTS = "Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, bool {}, "


# by target: the same norms, which write to the tensors of running statistics that they are given, and return them
WRITING: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {}


def _returning(name: str, own: str, norm: Callable[..., Tensor]) -> None:
    """Register a norm with the arguments of torch's own that returns its running statistics."""

    def writing(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, own: bool, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return norm(input, weight, bias, mean, var, own, *rest), mean, var

    def function(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, own: bool, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return writing(input, weight, bias, mean.clone(), var.clone(), own, *rest)

    arguments = _ARGUMENTS.format(own) + "float momentum, float eps, bool cudnn_enabled"
    _composite(f"{name}({arguments}) -> (Tensor, Tensor, Tensor)", function)
    WRITING[f"tapas.{name}.default"] = writing


_returning("batch_norm", "training", torch.batch_norm)
_returning("instance_norm", "use_input_stats", torch.instance_norm)
