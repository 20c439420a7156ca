"""What an optimizer keeps for every number of a parameter."""

from dataclasses import dataclass

from tapas.errors import TapasError, nearest

# kind -> moments it keeps, and bytes of each where they are not those of the numbers they belong to
_MOMENTS: dict[str, tuple[int, int | None]] = {
    "adam": (2, None), "adam8bit": (2, 1), "momentum": (1, None), "sgd": (0, None),
}  # fmt: skip
NAMES = tuple(_MOMENTS)
FULL = 4  # bytes of float32


@dataclass(frozen=True, slots=True)
class Optimizer:
    name: str = "adam"
    master: bool = True  # weights narrower than float32 have a copy in float32 that is updated, and moments to match

    def __post_init__(self) -> None:
        if self.name not in _MOMENTS:
            raise TapasError(f"optimizer {self.name}", "is not known", nearest(self.name, list(NAMES)))

    def state_bytes(self, itemsize: int) -> int:
        """For one number of a parameter that takes `itemsize` bytes."""
        copied = self.master and itemsize < FULL
        moments, narrow = _MOMENTS[self.name]
        return moments * (narrow or (FULL if copied else itemsize)) + (FULL if copied else 0)


ADAM = Optimizer()
