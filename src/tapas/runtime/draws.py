"""Random numbers of the parallel program: streams that all ranks start in step, whatever users' generators do.

Ranks that hold the same shard of a result draw the same numbers for it, others draw others. Operators draw from torch's
default generators, for most of them take no other. During a forward pass these are the program's: each block starts its
stream by a seed, which costs a microsecond and asks no device. Afterwards they are what they were.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tapas.errors import TapasError
from tapas.runtime.untraced import untraced

_ODD = 0x9E3779B97F4A7C15  # splitmix64


@dataclass
class Draws:
    """Streams by number: the same numbers give the same seeds on every rank."""

    seed: int = 0
    number: int = 0  # of the stream that was started last
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @untraced  # generators are no part of a graph
    def start(self, shard: int) -> None:
        """The next stream, of a shard."""
        self.number += 1
        self._seed(shard)

    def _seed(self, shard: int) -> None:
        for generator in default_generators(self.device):
            generator.manual_seed(self.seed_of(self.number) + shard)

    def seed_of(self, number: int) -> int:
        z = (self.seed + number * _ODD) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31) % 2**62

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, the default generators are the program's."""
        generators = default_generators(self.device)
        states = [generator.get_state() for generator in generators]
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    @contextmanager
    def again(self, number: int, shard: int) -> Iterator[None]:
        """As they were drawn since a stream was started: a block that is computed again draws what it drew."""
        now, self.number = self.number, number
        try:
            with self.apart():
                self._seed(shard)
                yield
        finally:
            self.number = now


@untraced
def default_generators(device: torch.device) -> list[torch.Generator]:
    """Those that operators on a device draw from: some ask the one of the CPU for a seed."""
    if device.type == "cpu":
        return [torch.default_generator]
    module = torch.get_device_module(device)
    if not hasattr(module, "default_generators"):
        raise TapasError(
            "random operators", f"devices of type {device.type} do not tell their default generators",
            "set dropout to 0, or use devices of type cpu, cuda or xpu",
        )  # fmt: skip
    number = module.current_device() if device.index is None else device.index
    return [torch.default_generator, module.default_generators[number]]
