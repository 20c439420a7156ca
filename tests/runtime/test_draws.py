"""Seeds are drawn in step, and drawn again where a block is computed again."""

from tapas.runtime.draws import Draws


def test_the_same_seeds_from_the_same_seed() -> None:
    one, two, other = ([draws.next_seed() for _ in range(100)] for draws in (Draws(1), Draws(1), Draws(2)))
    assert one == two and len({*one, *other}) == 200


def test_drawn_again() -> None:
    draws = Draws(3)
    start = draws.number
    with draws.since(start):
        first = [draws.next_seed() for _ in range(3)]
    later = draws.next_seed()
    with draws.since(start):
        assert [draws.next_seed() for _ in range(3)] == first
    assert draws.next_seed() not in (later, *first)
