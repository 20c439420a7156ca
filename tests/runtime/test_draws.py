"""Streams are started in step, drawn again where a block is computed again, and nobody else's numbers change."""

import pytest
import torch

from tapas.runtime.draws import Draws


def drawn(draws: Draws, shard: int) -> list[float]:
    draws.start(shard)
    return torch.rand(3).tolist()


def test_the_same_streams_from_the_same_seed() -> None:
    with Draws().apart():
        one, two, other = ([drawn(draws, 0) for _ in range(100)] for draws in (Draws(1), Draws(1), Draws(2)))
        assert one == two and len({x for stream in (*one, *other) for x in stream}) > 590
        assert drawn(Draws(1), 0) == one[0] != drawn(Draws(1), 1)


def test_drawn_again() -> None:
    """Also streams that are started after the first one."""
    draws = Draws(3)
    with draws.apart():
        first = drawn(draws, 5)
        number = draws.number
        second = drawn(draws, 0)
        later = drawn(draws, 5)
    with draws.again(number, 5):
        assert [torch.rand(3).tolist(), drawn(draws, 0)] == [first, second]
    with draws.apart():
        assert drawn(draws, 5) not in (first, second, later)


def test_the_users_generator_is_left_alone() -> None:
    draws, before = Draws(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="half-way"), draws.apart():
        drawn(draws, 0)
        with draws.again(1, 0):
            torch.rand(5)
            raise RuntimeError("half-way")
    assert torch.equal(before, torch.get_rng_state()) and draws.number == 1
