"""Bytes: when they are there, and what an optimizer keeps for every number of a parameter.

Activations pile up in the forward pass, copy by copy of the model's blocks; in the backward pass they go again, while
gradients come. A moment is the turn of one operator in the backward pass of one copy. Copies before it have been
through the forward pass only, copies after it are done with both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tapas.errors import TapasError, nearest


@dataclass(frozen=True, slots=True)
class CopiesAt:
    """Where the copies of a block are at a moment."""

    before: int = 0  # so many have been through the forward pass only
    place: int | None = None  # in one more, the operator at this place is at its turn
    after: int = 0  # so many are done with the backward pass
    idle: int = 0  # so many have neither kept nor made anything

    @property
    def count(self) -> int:
        return self.before + (self.place is not None) + self.after + self.idle


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When some bytes of a copy are there."""

    always: bool = False
    modes: tuple[str, ...] = ()  # from its forward to its backward pass, if recomputation is in one of these modes
    turns: range = range(0)  # at the turns of these of its own operators,
    turn_modes: tuple[str, ...] | None = None  # in these modes only
    after: bool = False  # once it is done with the backward pass

    def times(self, copies: CopiesAt, mode: str) -> int:
        """How many copies have them at a moment."""
        if self.always:
            return copies.count
        here = copies.place is not None and copies.place in self.turns and self.turns_in(mode)
        return copies.before * (mode in self.modes) + here + copies.after * self.after

    def turns_in(self, mode: str) -> bool:
        return self.turn_modes is None or mode in self.turn_modes

    def times_by_mode(self, copies: CopiesAt, modes: Sequence[str]) -> list[int]:
        return [self.times(copies, mode) for mode in modes]


ALWAYS = Lifetime(always=True)


def gradient_lifetime(first_reader: int) -> Lifetime:
    """From after the turn of the first operator that reads the weight, which is the last to add to its gradient."""
    return Lifetime(turns=range(first_reader), after=True)


def shared_gradient_lifetime(modes: tuple[str, ...]) -> Lifetime:
    """Of a weight that other blocks read: from the turn of the first of them on, which is next to the beginning."""
    return Lifetime(modes=modes, after=True)


def working_lifetime(place: int) -> Lifetime:
    return Lifetime(turns=range(place, place + 1))


def saved_lifetime(place: int, places: int, modes: tuple[str, ...], computed: bool) -> Lifetime:
    """What an operator keeps for the backward pass: in the modes that keep it; and, where it is `computed` again if
    not kept, at the turns of its copy down to its own."""
    return Lifetime(modes=modes, turns=range(place, places) if computed else range(0))


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
