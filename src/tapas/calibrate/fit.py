"""The figures of a device with which the cost model says what was measured."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapas.cost.kernels import Work
from tapas.hardware.cluster import Device
from tapas.hardware.efficiency import Efficiency

# What of a family is looked for; others of its figures stay as they are.
PRODUCT, MEMORY = ("flops", "half_dim"), ("forward", "backward")
FREE = {
    "matmul": (*PRODUCT, "even", "odd"),
    "grouped_matmul": ("flops", "back"),
    "convolution": PRODUCT,
    "attention": (*PRODUCT, "half_length", "back"),
    "unfused_attention": ("flops", "back"),
}
LEAST, MOST = 1e-4, 1.0  # shares
SIZES = ("half_dim", "half_length")  # others are shares, but for `back`
ROUNDS, SMALL = 60, 1e-6
INSIDE = 0.5  # where shares begin: at their bounds nothing moves


@dataclass(frozen=True)
class Sample:
    """A probe, as it was measured."""

    family: str
    title: str
    work: Sequence[Work]
    forward: float
    backward: float
    narrow: bool = False

    def predicted(self, device: Device) -> tuple[float, float]:
        seconds = [work.seconds(device) for work in self.work]
        return sum(float(ahead[0]) for ahead, _ in seconds), sum(float(back[0]) for _, back in seconds)

    def errors(self, device: Device) -> list[float]:
        """Logarithms of predicted over measured."""
        pairs = zip(self.predicted(device), (self.forward, self.backward), strict=True)
        return [math.log(ours / theirs) for ours, theirs in pairs if ours > 0]

    @property
    def flops_per_s(self) -> float:
        return max(float(work.flops) for work in self.work) / self.forward

    @property
    def bytes_per_s(self) -> float:
        return float(sum(work.traffic[0] for work in self.work)) / self.forward


@dataclass(frozen=True, slots=True)
class Fit:
    family: str
    samples: int
    typical: float  # predicted / measured is off by so much in the median, 0.1 for 10 %
    worst: float


def with_family(device: Device, name: str, efficiency: Efficiency) -> Device:
    families = {**dict(device.families), name: efficiency}
    return replace(
        device,
        families=tuple(families.items()),
        efficiency=efficiency.flops if name == "matmul" else device.efficiency,
    )


def fit_family(device: Device, name: str, samples: Sequence[Sample]) -> Device:
    """The device with the figures of a family at which the squares of the errors are least."""
    free = FREE.get(name, MEMORY)
    start = replace(device.family(name), **{key: 1.0 for key in free if key in MEMORY})

    def errors(values: Mapping[str, float]) -> list[float]:
        tried = with_family(device, name, replace(start, **values))
        return [error for sample in samples for error in sample.errors(tried)]

    values = {key: min(getattr(start, key), INSIDE) or 32.0 for key in free}
    return with_family(device, name, replace(start, **least_squares(values, errors, bounds_of)))


def bounds_of(key: str) -> tuple[float, float]:
    if key in SIZES:
        return 1e-3, 1e5
    return (0.5, 20.0) if key == "back" else (LEAST, MOST)


def least_squares(
    values: dict[str, float],
    errors: Callable[[Mapping[str, float]], Sequence[float]],
    bounds: Callable[[str], tuple[float, float]],
) -> dict[str, float]:
    """The figures at which the squares of some errors are least (Levenberg and Marquardt, on their logarithms).

    >>> found = least_squares({"a": 1.0, "b": 1.0}, lambda v: [v["a"] * v["b"] - 6, v["a"] - 2], lambda key: (0.1, 100))
    >>> round(found["a"], 3), round(found["b"], 3)
    (2.0, 3.0)
    """
    keys = list(values)
    low, high = (np.log([bounds(key)[end] for key in keys]) for end in range(2))

    def at(point: np.ndarray) -> np.ndarray:
        return np.array(errors(dict(zip(keys, np.exp(point).tolist(), strict=True))))

    point = np.clip(np.log([values[key] for key in keys]), low, high)
    found, damping = at(point), 1.0
    for _ in range(ROUNDS):
        slope = np.stack([(at(point + SMALL * unit) - found) / SMALL for unit in np.eye(len(keys))], axis=1)
        normal = slope.T @ slope
        step = np.linalg.solve(normal + damping * np.diag(normal.diagonal() + SMALL), -slope.T @ found)
        tried = np.clip(point + step, low, high)
        better = at(tried)
        if better @ better < found @ found:
            point, found, damping = tried, better, damping / 4
        else:
            damping *= 4
        if damping > 1e9:
            break
    return dict(zip(keys, np.exp(point).tolist(), strict=True))


def quality(device: Device, name: str, samples: Sequence[Sample]) -> Fit:
    errors = [abs(e) for sample in samples for e in sample.errors(device)]
    return Fit(name, len(samples), math.expm1(statistics.median(errors)), math.expm1(max(errors)))
