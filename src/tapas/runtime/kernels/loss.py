"""Losses whose mean or whose classes span devices."""

from typing import Any

import torch

from tapas.rules.base import Local
from tapas.runtime.kernels.common import Comms, Reader, accumulated, axes_of, largest, localize, nothing, total
from tapas.runtime.kernels.normalize import peak

NONE, MEAN = 0, 1  # torch's numbers for reductions


def mean_loss(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    """A mean over elements: this rank's share of it. Nothing is sent."""
    here = torch.broadcast_shapes(*(x.shape for x in operands)).numel()
    share = here / max(1, torch.broadcast_shapes(*(t.shape for t in local.call.operands)).numel())
    if here == 0:
        return nothing(local, operands)
    return Reader(local, operands).run() * share


def _class_dim(x: torch.Tensor) -> int:
    return 1 if x.dim() > 1 else 0


def _reduced(local: Local, comms: Comms, loss: torch.Tensor, weight: torch.Tensor, reduction: int) -> torch.Tensor:
    """Losses of this rank's tokens, reduced. A mean is of all ranks' tokens: its two sums travel together."""
    if reduction == NONE:
        return loss
    if reduction == MEAN:
        tokens = [name for name in local.choice if name.startswith("d")]
        known = torch.stack([loss.sum(), weight.sum().to(loss.dtype)])
        summed, count = total(comms, axes_of(local, tokens), known)
        return summed / count
    return loss.sum()


def _picked(x: torch.Tensor, target: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """x at the target class where it is held here, else zero."""
    dim = _class_dim(x)
    if x.shape[dim] == 0:
        return x.sum(dim)
    return torch.where(mine, x.gather(dim, target.unsqueeze(dim)).squeeze(dim), 0)


def _weights(weight: torch.Tensor | None, place: torch.Tensor, mine: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight of each token's class where that class is held here."""
    if weight is None or not weight.numel():
        return mine.to(dtype)
    return torch.where(mine, weight[place].to(dtype), 0)


def nll_loss(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    read = Reader(local, operands)
    x, target, weight = read("self"), read("target"), read("weight")
    kept = target != read("ignore_index")
    place, held = localize(target, local.operand_pieces(0, _class_dim(x)))
    dtype, reduction = accumulated(x.dtype), read("reduction")
    loss = -_picked(x, place, kept & held).to(dtype)
    weights = kept.to(dtype)
    if weight is not None:
        weights = _weights(weight, place, kept & held, dtype)
        loss = loss * weights
        if reduction == MEAN:  # only the rank that holds a class knows its weight
            weights = total(comms, local.axes_of("c"), weights.sum())
    return _reduced(local, comms, loss, weights, reduction).to(x.dtype)


def cross_entropy(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    read = Reader(local, operands)
    x, target = read("self"), read("target")
    if target.is_floating_point():
        loss, weight = _soft_cross_entropy(local, comms, read)
    elif local.axes_of("c"):
        loss, weight = _class_cross_entropy(local, comms, read)
    else:
        loss, weight = _token_cross_entropy(read)
    return _reduced(local, comms, loss, weight, read("reduction")).to(x.dtype)


def _token_cross_entropy(read: Reader) -> tuple[torch.Tensor, torch.Tensor]:
    """All classes are here: the operator itself gives the losses."""
    x, target, weight = read("self"), read("target"), read("weight")
    dtype = accumulated(x.dtype)
    kept = target != read("ignore_index")
    if x.numel() == 0:  # no tokens: the operator refuses
        return x.sum(_class_dim(x)).to(dtype), kept.to(dtype)
    weights = _weights(weight, torch.where(kept, target, 0), kept, dtype)
    return read.run(reduction=NONE).to(dtype), weights


class _Known(torch.autograd.Function):
    """What this rank knows of its tokens: the sum of exponentials, and the logit of the target where it is held here.

    By hand, because the gradient of logits is the largest tensor of many a step: autograd makes three of them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, top: torch.Tensor, place: torch.Tensor, mine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exponentials = (x - top).exp_()
        ctx.save_for_backward(exponentials, place, mine)
        return exponentials.sum(_class_dim(x)), _picked(x, place, mine)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        exponentials, place, mine = ctx.saved_tensors
        dim = _class_dim(exponentials)
        to_x = exponentials * grads[0].unsqueeze(dim)
        if exponentials.shape[dim]:
            to_x.scatter_add_(dim, place.unsqueeze(dim), torch.where(mine, grads[1], 0).unsqueeze(dim))
        return to_x, None, None, None


def _class_cross_entropy(local: Local, comms: Comms, read: Reader) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank has some classes: what it knows is summed in one all-reduce, after one for the maximum."""
    x, target, weight = read("self"), read("target"), read("weight")
    smoothing, classes = read("label_smoothing"), local.call.operands[0].shape[_class_dim(x)]
    axes, dim, dtype = local.axes_of("c"), _class_dim(x), accumulated(x.dtype)
    kept = target != read("ignore_index")
    place, held = localize(target, local.operand_pieces(0, dim))
    x = x.to(dtype)
    top = largest(comms, axes, peak(x.detach(), dim))
    known = [*_Known.apply(x, top, place, kept & held)]  # type: ignore[misc]
    if weight is not None:
        known.append(_weights(weight, place, kept & held, dtype))
    if smoothing:
        by_class = x if weight is None else x * _shaped(weight, x).to(dtype)
        known.append(by_class.sum(dim))
    if smoothing and weight is not None:
        known.append(weight.sum().to(dtype).expand_as(known[0]))
    parts = list(total(comms, axes, torch.stack(known)))
    normalizer = parts[0].log() + top.squeeze(dim)
    weights = kept.to(dtype) if weight is None else parts[2]
    loss = weights * (normalizer - parts[1])
    if smoothing:
        count, by_class = (classes, parts[2]) if weight is None else (parts[4], parts[3])
        smooth = torch.where(kept, normalizer * count - by_class, 0)
        loss = (1 - smoothing) * loss + smoothing / classes * smooth
    return torch.where(kept, loss, 0), weights


def _shaped(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Class weights to multiply logits with."""
    return weight.reshape(-1, *[1] * (x.dim() - 1 - _class_dim(x)))


def _soft_cross_entropy(local: Local, comms: Comms, read: Reader) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets are probabilities; a mean is over tokens, whatever their weights."""
    x, target, weight = read("self"), read("target"), read("weight")
    smoothing, classes = read("label_smoothing"), local.call.operands[0].shape[_class_dim(x)]
    axes, dim, dtype = local.axes_of("c"), _class_dim(x), accumulated(x.dtype)
    x, target = x.to(dtype), target.to(dtype)
    if smoothing:
        target = target * (1 - smoothing) + smoothing / classes
    if weight is not None:
        target = target * _shaped(weight, x)
    top = largest(comms, axes, peak(x.detach(), dim))
    known = torch.stack([(x - top).exp().sum(dim), (target * x).sum(dim), target.sum(dim)])
    exponentials, product, mass = total(comms, axes, known)
    loss = mass * (exponentials.log() + top.squeeze(dim)) - product
    return loss, torch.ones_like(loss.detach())
