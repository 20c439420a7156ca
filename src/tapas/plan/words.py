"""What an axis does to an operator's work and to a weight, in words: for explanations and for tables."""

from tapas.rules import wording
from tapas.sharding.layout import parse_state


def part_words(target: str, option: str, role: str, result: str, capacity: float = 0.0) -> str:
    """What one axis divides of an operator's work; "" where every device does all of it. `capacity`: of what is sent by
    a joint factor, which says in brackets how."""
    name = option.partition("|")[0]
    if name in ("R", "B"):
        return ""
    if name[0] == "P" and name[1:].isdigit():
        return "partial sums"
    if name in wording(target).joint:
        said = wording(target).joint[name]
        return f"{said.removesuffix(')')}, capacity {capacity:g})" if capacity else said
    if role:
        return role
    if name in wording(target).factors:
        return wording(target).factors[name]
    if result.startswith("S("):
        return f"result dim {parse_state(result).dim}"
    return "what it sums up" if result == "P" else name


def stored_words(state: str) -> str:
    """`dim 0`, or "" for a weight that every device stores whole."""
    if not state.startswith("S("):
        return ""
    parsed = parse_state(state)
    segments = len(parsed.tiling)
    return f"dim {parsed.dim}" + (f" of each of {segments} parts" if segments > 1 else "")
