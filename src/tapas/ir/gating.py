"""What lies between the two products of an expert, in the words of a graph.

"silu" is silu(gate) * up, gate packed before up. "silu pairs limit=7.0 alpha=1.702 shift=1.0" takes elements in turn,
holds them within limits, scales what the activation sees, and adds to up. "relu2 alone" is an expert without a gate.
"""

from dataclasses import dataclass
from functools import cache

HALVES, PAIRS, ALONE = PACKINGS = ("halves", "pairs", "alone")
TRANSPOSED = "transposed"


@dataclass(frozen=True, slots=True)
class Gating:
    """act(alpha * gate) / alpha * (up + shift): SiLU so is gate * sigmoid(alpha * gate)."""

    activation: str
    packing: str = HALVES
    limit: float | None = None  # gate is that at most, up is between minus that and that
    alpha: float = 1.0
    shift: float = 0.0
    transposed: bool = False  # weights are [inputs, outputs]

    @property
    def parts(self) -> int:
        """Packed in the result of the first product."""
        return 1 if self.packing == ALONE else 2

    def __str__(self) -> str:
        words = [self.activation, *([self.packing] if self.packing != HALVES else [])]
        numbers = {"limit": self.limit, "alpha": self.alpha, "shift": self.shift}
        plain = {"limit": None, "alpha": 1.0, "shift": 0.0}
        words += [f"{name}={value!r}" for name, value in numbers.items() if value != plain[name]]
        return " ".join([*words, *([TRANSPOSED] if self.transposed else [])])


@cache
def gating_of(words: str) -> Gating:
    """What a graph says: the activation first, the rest where it is not plain."""
    activation, *others = words.split()
    numbers = {name: float(value) for name, _, value in (word.partition("=") for word in others if "=" in word)}
    packing = next((word for word in others if word in PACKINGS), HALVES)
    return Gating(activation, packing, **numbers, transposed=TRANSPOSED in others)  # type: ignore[arg-type]
