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
    untouched: np.ndarray  # of these, what the forward pass does not touch: most of a table is not looked up
    made: np.ndarray  # of results
    imbalance: Sequence[np.ndarray] = ()  # of the arithmetic: that of the most loaded device over the mean

    def seconds(self, device: Device) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward."""
        none, gradients = np.zeros(len(self.traffic)), [i for i, t in enumerate(self.call.operands) if t.priced]
        if self.rule.view and not (self.rule.scattered and gradients):
            return none, none
        family = device.family(self.rule.kernels_of)
        launch = device.launch_seconds * family.launches
        arithmetic = self.flops / self._flops_per_s(device, family)
        bandwidth = device.memory_bytes_per_s * self._spread(family)
        moved = self.traffic / bandwidth
        forward = np.maximum(arithmetic, (self.traffic - self.untouched) / (bandwidth * family.forward))
        forward = np.maximum(forward / (family.drawing if self.rule.random else 1.0), launch)
        if self.rule.view:
            return none, np.maximum(self.rule.scattered * moved / family.backward, launch)
        if not gradients or not self.rule.backward:
            return forward, none
        if not self.rule.flops:
            shortest = device.launch_seconds * len(gradients)
            return forward, np.maximum(self.rule.backward * moved / family.backward, shortest)
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
        sizes = [self.sizes[factor.name] for factor in self.rule.dealt] if self.rule.flops else []
        for size in (*sizes, *self.imbalance) if sizes else ():
            flops = flops * size
        return flops

    def _spread(self, family: Efficiency) -> Figure:
        """The share of the bandwidth that is reached where a kernel is spread over the device by the size of a factor;
        by a product whose columns or depth are few, too."""
        if self.rule.spread is not None:
            return _filled(self.sizes.get(self.rule.spread, 1), family.half_dim)
        if not self.rule.flops or self.rule.attended or not family.half_dim or self._by_channel:
            return 1.0
        _, columns, depth = self._dims()
        return _filled(np.minimum(columns, depth), family.half_dim)

    @property
    def _by_channel(self) -> bool:
        """A convolution of every channel by itself, for which units for matrices are no use."""
        return self.rule.channels is not None and self.call.operands[1].shape[self.rule.channels] == 1

    def _flops_per_s(self, device: Device, family: Efficiency) -> Figure:
        if self._by_channel:
            return device.peak("float32") * family.flops
        return device.peak(self.call.results[0].dtype) * self._reached(family)

    def _reached(self, family: Efficiency) -> Figure:
        """The share of the peak."""
        if not self.rule.flops:
            return 1.0
        if family.half_length or (family.half_dim and self.rule.attended):
            length = self.rule.seen * self.sizes.get(self.rule.attended or "", 1)
            size = self.call.operands[0].shape[-1]
            return family.flops * _filled(size, family.half_dim) * _filled(length, family.half_length)
        if not family.half_dim:
            return family.flops
        rows, columns, depth = self._dims()
        smallest = np.minimum(np.minimum(rows, columns), depth)
        rows_of_depth = depth if self.rule.channels is None else self.call.operands[1].shape[self.rule.channels]
        aligned = _aligned(columns, family) * _aligned(rows_of_depth, family)
        return family.flops * _filled(smallest, family.half_dim) * aligned

    def _dims(self) -> tuple[Figure, Figure, Figure]:
        """Rows, columns and depth of a product of two matrices, of which the second one is a convolution's weight."""
        first, second = ([i for i in range(len(self.call.operands)) if i != self.rule.added] + [0, 0])[:2]
        rows: Figure = 1.0
        columns: Figure = 1.0
        depth: Figure = 1.0
        for factor in self.rule.dealt:
            size, made = self.sizes[factor.name], any(factor.results)
            if factor.operands[second] is None:
                rows = rows * size
            elif not made:
                depth = depth * size
            elif factor.operands[first] is None:
                columns = columns * size
        return rows, columns, depth


@dataclass(frozen=True)
class Fused:
    """What of a call goes through memory where torch.compile makes one kernel of it and of others around it."""

    forward: tuple[float, ...]  # how often each operand and result is read or written
    backward: tuple[float, ...]  # the same for these and their gradients
    ends: bool  # kernels of other operators read its results

    def seconds(self, held: Sequence[np.ndarray], device: Device) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward; `held`: bytes of operands and results on a device."""
        bytes_per_s = device.memory_bytes_per_s * device.family("pointwise").forward
        ahead, back = (self.moved(held, shares) / bytes_per_s for shares in (self.forward, self.backward))
        if not self.ends:
            return ahead, back
        return np.maximum(ahead, device.launch_seconds), np.maximum(back, device.launch_seconds * any(self.backward))

    @staticmethod
    def moved(held: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
        return sum((nbytes * share for nbytes, share in zip(held, shares, strict=True)), start=np.zeros(1))


def whole_work(call: Call, rule: Rule) -> Work:
    """What a call is on a single device."""
    held = [np.array([float(t.nbytes)]) for t in (*call.operands, *call.results)]
    return work_of(call, rule, {factor.name: factor.size for factor in rule.dealt}, held)


def work_of(
    call: Call, rule: Rule, sizes: Sizes, held: Sequence[np.ndarray], imbalance: Sequence[np.ndarray] = ()
) -> Work:
    """`held`: bytes of operands and results on a device."""
    none = np.zeros(len(held[0]) if held else 1)
    made = sum(held[len(call.operands) :], start=none)
    table = held[rule.looked_up] if rule.looked_up is not None else none
    return Work(call, rule, sizes, sum(held, start=none), np.maximum(table - made, 0.0), made, imbalance)


def _filled(size: Figure, half: float) -> Figure:
    """The part of a kernel's tiles, and of its time, that is put to use."""
    return size / (size + half) if half else 1.0


def _aligned(size: Figure, family: Efficiency) -> Figure:
    whole = np.asarray(size)
    return np.where(whole % ALIGNED == 0, 1.0, np.where(whole % 2 == 0, family.even, family.odd))
