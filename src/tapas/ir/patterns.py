"""Names of repeated things: `model.layers.*.mlp.up_proj`, or `model.layers.{0,3-5}.mlp.up_proj`."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import repeat
from operator import itemgetter

Place = tuple[str, int]  # container, number in it


def spans(numbers: Sequence[int]) -> str:
    """[0, 3, 4, 5] -> `0,3-5`."""
    runs: list[list[int]] = []
    ordered = sorted(numbers)
    if ordered and ordered == [*range(ordered[0], ordered[-1] + 1)]:  # of a deep model mostly, and quickly told
        runs, ordered = [[ordered[0], ordered[-1]]], []
    for n in ordered:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def container(path: str) -> Place | None:
    """`model.layers.3` -> (`model.layers`, 3)."""
    name = path.rstrip("0123456789")
    return (name.removesuffix("."), int(path[len(name) :])) if len(name) < len(path) else None


def containers(paths: Sequence[str]) -> list[Place | None]:
    """The same for many; mostly they are numbered one after the other."""
    first = container(paths[0]) if paths else None
    if first is not None:
        name, number = first
        numbers = range(number, number + len(paths))
        if [f"{name}.{n}" for n in numbers] == paths:
            return list(zip(repeat(name), numbers, strict=False))
    return list(map(container, paths))


def pattern_of(paths: Sequence[str], members: Mapping[str, int]) -> str:
    """One pattern for the paths of some copies; `members` counts all numbered members of each container."""
    return pattern_at(paths[0], list(map(container, paths)), members)


def pattern_at(first: str, numbered: Sequence[Place | None], members: Mapping[str, int]) -> str:
    """The same by the places of the paths, of which the first is given."""
    places = [place for place in numbered if place is not None]
    if len(places) < len(numbered):
        return first
    parts: list[str] = []
    for name, many in Counter(map(itemgetter(0), places)).items():
        if many > 1 and many == members.get(name, 0):
            inner = "*"
        else:
            numbers = [number for where, number in places if where == name]
            inner = str(numbers[0]) if many == 1 else "{" + spans(numbers) + "}"
        parts.append(f"{name}.{inner}" if name else inner)
    return " | ".join(parts)


def inside(name: str, path: str, pattern: str) -> str:
    """A name within a copy, with the copy's path replaced by its pattern."""
    if path and name == path:
        return pattern
    if path and name.startswith(path + "."):
        return pattern + name[len(path) :]
    return name


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    """`*` is any text, `{0,3-5}` any of these numbers."""
    parts: list[str] = []
    for piece in re.split(r"(\{[\d,\-]+\})", pattern):
        if piece.startswith("{"):
            ends = [span.split("-") for span in piece[1:-1].split(",")]
            numbers = [str(n) for end in ends for n in range(int(end[0]), int(end[-1]) + 1)]
            parts.append(f"(?:{'|'.join(numbers)})")
        else:
            parts.append(re.escape(piece).replace(r"\*", ".*").replace(r"\?", "."))
    return re.compile("".join(parts))


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted name, or one of the modules it lies in, matches a pattern with `*` or `{0,3-5}`."""
    parts = name.split(".")
    regex = _regex(pattern)
    return any(regex.fullmatch(".".join(parts[:i])) for i in range(1, len(parts) + 1))
