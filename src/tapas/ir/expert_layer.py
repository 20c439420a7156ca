"""The experts of a mixture: every token passes through some of them, and how many pass through each depends on data.

In two ways. Either all slots (a token and one of its experts) are sorted by expert, and products go over all of them:
where each expert's rows end is known to the device only, and nobody waits for it. Or expert after expert, whose rows
the host has to count: on a CPU that costs nothing, and only one expert's rows are in the works at a time.
"""

# torch gives its decorators and tolist() no types.
# pyright: reportUnknownMemberType=false

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tapas.ir.activations import gated
from tapas.ir.gating import Gating


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """What the operator is given: hidden [T, h], index and weight [T, k], gate_up [E, 2f, h], down [E, h, f], and
    biases [E, 2f] and [E, h]. Without a gate gate_up is [E, f, h]."""

    hidden: Tensor
    index: Tensor
    weight: Tensor
    gate_up: Tensor
    down: Tensor
    gating: Gating
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def on_device(self) -> bool:
        """Whether a kernel takes group sizes that only the device knows. Of torch's, that is so for bfloat16 on Hopper,
        where rows start at multiples of 16 bytes; elsewhere it asks the device for the sizes, and on Blackwell
        (pytorch/pytorch issues 172439 and 193633) it leaves gradients of experts without tokens to chance."""
        device, weights = self.gate_up.device, (self.gate_up, self.down)
        if device.type != "cuda" or not _is_hopper(device) or any(w.dtype != torch.bfloat16 for w in weights):
            return False
        if any(w.numel() == 0 for w in weights):
            return False
        steps = [step for w in weights for step in (w.shape[-1], *w.stride()[:-1])]
        return all(w.stride(-1) == 1 for w in weights) and all(step % 8 == 0 for step in steps)

    def sorted(self) -> tuple[Tensor, Tensor]:
        """The slots (positions in the flattened index) by expert, and where the slots of each expert end; those of
        experts that are not here come last."""
        flat, count = self.index.reshape(-1), self.gate_up.shape[0]
        expert = torch.where((flat >= 0) & (flat < count), flat, count)
        expert, order = torch.sort(expert, stable=True)
        numbers = torch.arange(count, device=flat.device, dtype=expert.dtype)
        return order, torch.searchsorted(expert, numbers, right=True, out_int32=True)

    def groups(self) -> tuple[list[tuple[int, slice, Tensor]], Tensor]:
        """For every expert its number, where its slots lie among the sorted ones, and its slots; and the slots of no
        expert here."""
        order, ends = self.sorted()
        bounds = [0, *cast(list[int], ends.tolist())]
        groups = [(i, slice(start, end), order[start:end]) for i, (start, end) in enumerate(pairwise(bounds))]
        return groups, order[bounds[-1] :]

    @property
    def scale(self) -> Tensor:
        return self.weight.reshape(-1, 1)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


Gradients = list[Tensor]  # of hidden, weight, gate_up and down, and of the biases if there are any


def forward(layer: ExpertLayer) -> tuple[Tensor, Tensor]:
    """The result, and gate and up of all slots, sorted by expert: what the backward pass would have to compute again.
    What these are for slots of no expert is anything, and goes nowhere."""
    return sorted_forward(layer) if layer.on_device else looped_forward(layer)


def backward(grad: Tensor, layer: ExpertLayer, gate_up: Tensor) -> Gradients:
    """The gradient of a weight is the sum of what its slot returned times the gradient of that, and so the sum of what
    `down` was given times the gradient of that: what was returned need not be kept."""
    return sorted_backward(grad, layer, gate_up) if layer.on_device else looped_backward(grad, layer, gate_up)


# ---------------------------------------------------------------------------------------------
# All slots at once; what the products leave in rows of no expert is anything, too


def sorted_forward(m: ExpertLayer) -> tuple[Tensor, Tensor]:
    order, ends = m.sorted()
    gate_up = F.grouped_mm(_rows(m.hidden, m, order, m.gate_up), m.gate_up.mT, offs=ends)
    if m.gate_up_bias is not None:
        gate_up += _of_expert(m.gate_up_bias, m, order)
    inner, _ = gated(gate_up, m.gating)
    made = F.grouped_mm(inner, m.down.mT, offs=ends)
    if m.down_bias is not None:
        made += _of_expert(m.down_bias, m, order)
    return _summed((made * m.scale[order]).masked_fill_(_foreign(order, ends), 0), m, order), gate_up


def sorted_backward(grad: Tensor, m: ExpertLayer, gate_up: Tensor) -> Gradients:
    order, ends = m.sorted()
    out_grad, scale, foreign = _rows(grad, m, order, m.down), m.scale[order], _foreign(order, ends)
    inner, gradient = gated(gate_up, m.gating)
    unscaled, scaled = F.grouped_mm(out_grad, m.down, offs=ends), (out_grad * scale).to(m.down.dtype)
    weights = (unscaled * inner).sum(-1, keepdim=True, dtype=scale.dtype)
    if m.down_bias is not None:
        weights += (out_grad * _of_expert(m.down_bias, m, order)).sum(-1, keepdim=True, dtype=scale.dtype)
    down_grad = F.grouped_mm(scaled.t(), inner, offs=ends)
    gate_up_rows = gradient((unscaled * scale).to(m.down.dtype))
    gate_up_grad = F.grouped_mm(gate_up_rows.t(), _rows(m.hidden, m, order, m.gate_up), offs=ends)
    rows_grad = F.grouped_mm(gate_up_rows, m.gate_up, offs=ends).masked_fill_(foreign, 0)
    weights = weights.masked_fill_(foreign, 0)
    weight_grad = torch.empty_like(weights).index_copy_(0, order, weights).view(m.weight.shape)
    of_biases = [_added_up(rows, ends) for rows in (gate_up_rows, scaled)] if m.down_bias is not None else []
    return [_summed(rows_grad, m, order), weight_grad, gate_up_grad, down_grad, *of_biases]


def _rows(x: Tensor, m: ExpertLayer, order: Tensor, like: Tensor) -> Tensor:
    """The token's row for every slot."""
    return x.index_select(0, order // m.index.shape[1]).to(like.dtype)


def _of_expert(x: Tensor, m: ExpertLayer, order: Tensor) -> Tensor:
    """The expert's row for every slot; some row for those of no expert."""
    return x.index_select(0, m.index.reshape(-1)[order].clamp(0, len(x) - 1))


def _added_up(rows: Tensor, ends: Tensor) -> Tensor:
    """Over the slots of each expert, as products add up: in float32, and in the same order every time."""
    ones = rows.new_ones(len(rows), 16 // rows.itemsize)  # a kernel's least number of columns
    return F.grouped_mm(rows.t(), ones, offs=ends)[..., 0].contiguous()


def _foreign(order: Tensor, ends: Tensor) -> Tensor:
    """Which of the sorted slots belong to no expert here."""
    return (torch.arange(order.shape[0], device=order.device) >= ends[-1]).unsqueeze(-1)


def _summed(rows: Tensor, m: ExpertLayer, order: Tensor) -> Tensor:
    """What comes of a token's slots."""
    slots = torch.empty_like(rows).index_copy_(0, order, rows)
    return slots.view(*m.index.shape, -1).sum(1).to(m.hidden.dtype)


# ---------------------------------------------------------------------------------------------
# Expert after expert


def looped_forward(m: ExpertLayer) -> tuple[Tensor, Tensor]:
    slots, scale = m.index.shape[1], m.scale
    groups, foreign = m.groups()
    out = m.hidden.new_empty(
        (m.index.numel(), m.hidden.shape[-1]), dtype=torch.promote_types(m.down.dtype, scale.dtype)
    )
    gate_up = m.gate_up.new_empty((m.index.numel(), m.gate_up.shape[1]))
    for number, place, used in groups:
        rows = m.hidden.index_select(0, used // slots).to(m.gate_up.dtype)
        packed = torch.mm(rows, m.gate_up[number].t(), out=gate_up[place])
        if m.gate_up_bias is not None:
            packed += m.gate_up_bias[number]
        made = F.linear(gated(packed, m.gating)[0], m.down[number], _row(m.down_bias, number))
        out.index_copy_(0, used, made * scale.index_select(0, used))
    out.index_fill_(0, foreign, 0)
    return out.view(*m.index.shape, -1).sum(1).to(m.hidden.dtype), gate_up


def looped_backward(grad: Tensor, m: ExpertLayer, gate_up: Tensor) -> Gradients:
    slots, scale = m.index.shape[1], m.scale
    groups, foreign = m.groups()
    rows_grad = grad.new_empty((m.index.numel(), m.hidden.shape[-1]), dtype=m.gate_up.dtype)
    scale_grad, gate_up_grad, down_grad = map(torch.empty_like, (scale, m.gate_up, m.down))
    of_biases = [torch.empty_like(b) for b in (m.gate_up_bias, m.down_bias) if b is not None]
    for number, place, used in groups:  # a product without rows is zero
        token, weight = used // slots, scale.index_select(0, used)
        out_grad = grad.index_select(0, token)
        inner, gradient = gated(gate_up[place], m.gating)
        unscaled, scaled = out_grad.to(m.down.dtype) @ m.down[number], (out_grad * weight).to(m.down.dtype)
        weights = (unscaled * inner).sum(-1, keepdim=True, dtype=scale.dtype)
        if m.down_bias is not None:
            weights += (out_grad * m.down_bias[number]).sum(-1, keepdim=True, dtype=scale.dtype)
        scale_grad.index_copy_(0, used, weights)
        torch.mm(scaled.t(), inner, out=down_grad[number])
        gate_up_rows = gradient((unscaled * weight).to(m.down.dtype))
        rows = m.hidden.index_select(0, token).to(m.gate_up.dtype)
        torch.mm(gate_up_rows.t(), rows, out=gate_up_grad[number])
        rows_grad.index_copy_(0, used, gate_up_rows @ m.gate_up[number])
        for of_bias, summed in zip(of_biases, (gate_up_rows, scaled), strict=False):
            of_bias[number] = summed.sum(0)
    rows_grad.index_fill_(0, foreign, 0)
    scale_grad.index_fill_(0, foreign, 0)
    hidden_grad = rows_grad.view(*m.index.shape, -1).sum(1).to(m.hidden.dtype)
    return [hidden_grad, scale_grad.view(m.weight.shape), gate_up_grad, down_grad, *of_biases]


def _row(x: Tensor | None, number: int) -> Tensor | None:
    return None if x is None else x[number]
