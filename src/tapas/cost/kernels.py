"""Seconds that an operator's kernels take, forward and backward.

They follow a roofline: the slower of arithmetic and memory traffic, at the rates that kernels of the operator's family
reach on the device for its sizes, and never less than the shortest kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapas.hardware.cluster import Device
from tapas.hardware.efficiency import ALIGNED, Efficiency
from tapas.rules.base import Call, Rule

Figure = np.ndarray | float
Sizes = dict[str, np.ndarray | int]  # of factors


@dataclass(frozen=True)
class Work:
    """What a call is on a device, under each of its choices."""

    call: Call
    rule: Rule
    sizes: Sizes  # local ones of its factors
    traffic: np.ndarray  # bytes of operands and results
    made: np.ndarray  # of results
    imbalance: Sequence[np.ndarray] = ()  # of the arithmetic: that of the most loaded device over the mean

    def seconds(self, device: Device) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward."""
        none = np.zeros(len(self.traffic))
        if self.rule.view:
            return none, none
        family, launch = device.family(self.rule.kernels_of), device.launch_seconds
        arithmetic = self.flops / (device.peak(self.call.results[0].dtype) * self._reached(family))
        moved = self.traffic / device.memory_bytes_per_s
        forward = np.maximum(np.maximum(arithmetic, moved / family.forward), launch)
        gradients = [i for i, t in enumerate(self.call.operands) if t.priced]
        if not gradients or not self.rule.backward:
            return forward, none
        if not self.rule.flops:
            return forward, np.maximum(self.rule.backward * moved / family.backward, launch * len(gradients))
        # one product for each operand that wants a gradient; attention has more to do
        passes = family.back or min(len([i for i in gradients if i != self.rule.added]), 2)
        backward = passes * np.maximum(np.maximum(arithmetic, moved / family.backward), launch)
        if self.rule.added in gradients:
            summed = device.memory_bytes_per_s * device.family("strided").forward
            backward = backward + np.maximum(self.made / summed, launch)
        return forward, backward

    @property
    def flops(self) -> Figure:
        flops: Figure = float(self.rule.flops)
        for factor in (*self.sizes.values(), *self.imbalance) if self.rule.flops else ():
            flops = flops * factor
        return flops

    def _reached(self, family: Efficiency) -> Figure:
        """The share of the peak."""
        if not self.rule.flops:
            return 1.0
        if family.half_length or (family.half_dim and self.rule.attended):
            length = self.sizes.get(self.rule.attended or "", 1)
            size = self.call.operands[0].shape[-1]
            return family.flops * _filled(size, family.half_dim) * _filled(length, family.half_length)
        if not family.half_dim:
            return family.flops
        rows, columns, depth = self._dims()
        smallest = np.minimum(np.minimum(rows, columns), depth)
        return family.flops * _filled(smallest, family.half_dim) * _aligned(columns, family) * _aligned(depth, family)

    def _dims(self) -> tuple[Figure, Figure, Figure]:
        """Rows, columns and depth of a product of two matrices, of which the second one is a convolution's weight."""
        first, second = ([i for i in range(len(self.call.operands)) if i != self.rule.added] + [0, 0])[:2]
        rows: Figure = 1.0
        columns: Figure = 1.0
        depth: Figure = 1.0
        for factor in self.rule.factors:
            size, made = self.sizes[factor.name], any(factor.results)
            if factor.operands[second] is None:
                rows = rows * size
            elif not made:
                depth = depth * size
            elif factor.operands[first] is None:
                columns = columns * size
        return rows, columns, depth


def whole_work(call: Call, rule: Rule) -> Work:
    """What a call is on a single device."""
    held, made = (np.array([float(sum(t.nbytes for t in some))]) for some in (call.operands, call.results))
    return Work(call, rule, {factor.name: factor.size for factor in rule.factors}, held + made, made)


def _filled(size: Figure, half: float) -> Figure:
    """The part of a kernel's tiles, and of its time, that is put to use."""
    return size / (size + half) if half else 1.0


def _aligned(size: Figure, family: Efficiency) -> Figure:
    whole = np.asarray(size)
    return np.where(whole % ALIGNED == 0, 1.0, np.where(whole % 2 == 0, family.even, family.odd))
