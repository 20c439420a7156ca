"""Things that operators find by a number: torch gives operators tensors and numbers only, and a number stands for one
thing in this process."""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

_numbers = count()
_known: WeakValueDictionary[int, Any] = WeakValueDictionary()


def register(what: Any) -> int:
    number = next(_numbers)
    _known[number] = what
    return number


def numbered(number: int) -> Any:
    return _known[number]
