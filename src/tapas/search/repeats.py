"""Sequences whose items mostly repeat the one before: each with how often it comes in a row."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")


def counted(items: Sequence[T]) -> list[tuple[T, int]]:
    """(a, a, b) -> (a, 2), (b, 1)."""
    if items and items.count(items[0]) == len(items):  # mostly, and quickly told
        return [(items[0], len(items))]
    return [(item, len(list(same))) for item, same in groupby(items)]


def joined(left: tuple[tuple[T, int], ...], right: tuple[tuple[T, int], ...]) -> tuple[tuple[T, int], ...]:
    """One sequence after the other."""
    (item, times), (after, more) = left[-1], right[0]
    return (*left[:-1], (item, times + more), *right[1:]) if item == after else left + right


def neighbours(found: Sequence[tuple[T, int]]) -> Iterator[tuple[T, T, int]]:
    """Items with the one before: (a, 2), (b, 1) -> (a, a, 1), (a, b, 1)."""
    for number, (item, times) in enumerate(found):
        if number:
            yield found[number - 1][0], item, 1
        if times > 1:
            yield item, item, times - 1
