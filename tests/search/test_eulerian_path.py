"""Paths that take every transition."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from tapas.search.eulerian_path import Transition, eulerian_path, unreached_states


@pytest.mark.parametrize("seed", range(50))
def test_a_path_takes_every_transition(seed: int) -> None:
    random = np.random.default_rng(seed)
    states = random.integers(0, 4, random.integers(2, 30)).tolist()
    taken = Counter((a, b, int(random.integers(2))) for a, b in pairwise(states))
    transitions = [Transition(a, b, number, times) for number, ((a, b, _), times) in enumerate(taken.items())]
    path = eulerian_path(states[0], transitions)
    assert not unreached_states(states[0], transitions)
    assert Counter(path) == {number: edge.times for number, edge in enumerate(transitions)}
    assert all(transitions[a].after == transitions[b].before for a, b in pairwise(path))
    assert transitions[path[0]].before == states[0]
    for number, edge in enumerate(transitions):
        if edge.before == edge.after:  # copies that do the same stay together
            places = [i for i, taken in enumerate(path) if taken == number]
            assert places == list(range(places[0], places[0] + len(places)))


def test_states_that_are_not_reached() -> None:
    transitions = [Transition(0, 0, 0, 3), Transition(1, 2, 1, 1), Transition(2, 1, 2, 1), Transition(3, 3, 3, 5)]
    assert unreached_states(0, transitions) == {1, 2}
    assert unreached_states(3, transitions[2:]) == {1, 2}
    assert unreached_states(0, [*transitions, Transition(0, 1, 4, 1), Transition(1, 3, 5, 1)]) == set()
