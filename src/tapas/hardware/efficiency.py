"""What kernels reach of a device's peak rates, by family of operators.

A few numbers for each: what a large kernel reaches, and how that falls off with small, short or misaligned operands.
"""

from dataclasses import dataclass, fields

# Families that rules name (see Rule.family); those of the optimizer's update, by what it mostly reads and writes.
FAMILIES = (
    "matmul", "grouped_matmul", "convolution", "attention", "unfused_attention", "pointwise", "strided", "norm",
    "batch_norm", "softmax", "cross_entropy", "embedding", "index", "sort", "optimizer", "narrow_optimizer",
)  # fmt: skip
ALIGNED = 8  # elements: kernels for matrices want rows to begin at multiples of so many


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a peak, between 0 and 1; what is left out has no influence."""

    flops: float = 1.0  # of the peak rate of arithmetic, that large operators reach
    half_dim: float = 0.0  # the size of the smallest dim (of heads, for attention) at which half of that is left
    half_length: float = 0.0  # the same for the length of a sequence
    even: float = 1.0  # what is left of it where a dim is no multiple of ALIGNED
    odd: float = 1.0  # or odd
    forward: float = 1.0  # of the memory's bandwidth
    backward: float = 1.0
    back: float = 0.0  # seconds of the backward pass for one of the forward pass; 0: a product for each gradient

    def figures(self) -> dict[str, float]:
        """Those that have an influence."""
        found = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in found.items() if value != default}
