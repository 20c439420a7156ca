"""Names of repeated things: `model.layers.*.mlp.up_proj`, or `model.layers.{0,3-5}.mlp.up_proj`."""

import re
from collections.abc import Sequence
from functools import cache, lru_cache


def spans(numbers: Sequence[int]) -> str:
    """[0, 3, 4, 5] -> `0,3-5`."""
    found: list[list[int]] = []
    for n in sorted(numbers):
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


@lru_cache(100_000)  # every parameter and operator asks for its copies' paths
def container(path: str) -> tuple[str, int] | None:
    """`model.layers.3` -> (`model.layers`, 3)."""
    match = re.fullmatch(r"(.*?)\.?(\d+)", path)
    return (match[1], int(match[2])) if match else None


def pattern_of(paths: Sequence[str], members: dict[str, int]) -> str:
    """One pattern for the paths of some copies; `members` counts all numbered members of each container."""
    numbers: dict[str, list[int]] = {}
    for path in paths:
        place = container(path)
        if place is None:
            return paths[0]
        numbers.setdefault(place[0], []).append(place[1])
    parts = []
    for name, found in numbers.items():
        if len(found) == 1:
            inner = str(found[0])
        elif len(found) == members.get(name, 0):
            inner = "*"
        else:
            inner = "{" + spans(found) + "}"
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
    parts = []
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
