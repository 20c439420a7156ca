"""Many items at once, by keys that stay the same: deep models ask for them layer after layer."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

Picking = Callable[[Any], tuple]


def picking(keys: Sequence[Any]) -> Picking:
    """A function that gets the items with these keys, as a tuple however many there are."""
    if len(keys) > 1:
        return itemgetter(*keys)
    if not keys:
        return lambda _: ()
    (key,) = keys
    return lambda held: (held[key],)
