"""What kernels reach of a device's peak rates, by family of operators.

A few numbers for each: what a large kernel reaches, and how that falls off with small, short or misaligned operands.
"""

from dataclasses import dataclass, fields

# Families that rules name (see Rule.family); those of the optimizer's update, by what it mostly reads and writes.
FAMILIES = (
    "matmul", "grouped_matmul", "convolution", "attention", "unfused_attention", "pointwise", "strided", "narrowing",
    "widening", "concatenation", "reduction", "norm", "batch_norm", "softmax", "cross_entropy", "embedding", "index",
    "sort", "optimizer", "narrow_optimizer",
)  # fmt: skip
ALIGNED = 8  # elements: kernels for matrices want rows to begin at multiples of so many


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a peak, between 0 and 1; what is left out has no influence."""

    flops: float = 1.0  # of the peak rate of arithmetic, that large operators reach
    # The size at which half of that is left: of a product's smallest dim, of heads; for norms, half of the bandwidth,
    # and the size is that of the dim that is normalized, or of channels.
    half_dim: float = 0.0
    half_length: float = 0.0  # the same for how much of a sequence each of its elements looks at
    even: float = 1.0  # what is left of it where a dim is no multiple of ALIGNED
    odd: float = 1.0  # or odd
    forward: float = 1.0  # of the memory's bandwidth
    backward: float = 1.0
    back: float = 0.0  # seconds of the backward pass for one of the forward pass; 0: a product for each gradient
    drawing: float = 1.0  # what is left of the forward pass's rate where random numbers are drawn
    launches: float = 1.0  # the shortest kernel, over the shortest one of all
    keeps: float = 1.0  # the share of what an unfused kernel keeps for the backward pass

    def figures(self) -> dict[str, float]:
        """Those that have an influence."""
        found = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in found.items() if value != default}
