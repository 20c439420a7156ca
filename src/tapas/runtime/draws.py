"""Random numbers of the parallel program: seeds that all ranks draw in step, whatever users' generators do."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_ODD = 0x9E3779B97F4A7C15  # splitmix64


@dataclass
class Draws:
    """Seeds by number: the same numbers give the same seeds on every rank."""

    seed: int = 0
    number: int = 0  # of the next one

    def next_seed(self) -> int:
        self.number += 1
        z = (self.seed + self.number * _ODD) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31) % 2**62

    @contextmanager
    def since(self, number: int) -> Iterator[None]:
        """As they were drawn from a certain one on: a block that is computed again draws what it drew."""
        now, self.number = self.number, number
        try:
            yield
        finally:
            self.number = max(now, self.number)
