"""States, factors and collectives in plain words."""

import re
from collections.abc import Sequence

import tapas.rules  # noqa: F401  # registers them
from tapas.plan.plan import Move, Operator, Plan
from tapas.plan.words import part_words, stored_words
from tapas.rules.base import wording

REPEATED = "repeated"


def kind(target: str) -> str:
    """`aten.linear.default` -> `linear`."""
    parts = target.split(".")
    name = parts[1] if len(parts) > 1 else target
    return wording(target).name or name.strip("_").replace("_", " ")


def op_name(module: str, target: str) -> str:
    return f"{module} ({kind(target)})" if module else kind(target)


def work_parts(op: Operator) -> tuple[str, ...]:
    roles = op.roles or ("",) * len(op.choice)
    each = zip(op.choice, roles, op.result, strict=True)
    return tuple(part_words(op.target, choice, role, result, op.capacity) for choice, role, result in each)


def collective_inside(op: Operator) -> str:
    """What an operator's sharded implementation sends by: those of joint factors say so in brackets."""
    joint = wording(op.target).joint
    said = [joint[name].partition("(")[2].rstrip(")") for name in op.choice if name in joint]
    return said[0] if said else "all-reduce"


def by_axis(words: Sequence[str], axes: Sequence[str]) -> list[tuple[str, str]]:
    """Axes that do the same belong together: (words, "x,y")."""
    found: dict[str, list[str]] = {}
    for text, axis in zip(words, axes, strict=True):
        if text:
            found.setdefault(text, []).append(axis)
    return [(text, ",".join(where)) for text, where in found.items()]


def work(op: Operator, axes: Sequence[str]) -> str:
    """`batch over x`, `heads over y`: a line for each."""
    return split_text(work_parts(op), axes)


def split_text(parts: Sequence[str], axes: Sequence[str], whole: str = REPEATED) -> str:
    """In what way stands behind the axes: `sequence over x (ring)`."""
    lines = [re.sub(r"(?=,| \(|$)", f" over {where}", text, count=1) for text, where in by_axis(parts, axes)]
    return "\n".join(lines) or whole


def storage(states: Sequence[str], axes: Sequence[str]) -> str:
    """`dim 0 over x,y`, or `whole`."""
    return split_text([stored_words(s) for s in states], axes, "whole")


def _use(stored: str, used: str) -> str:
    """What is sent of a weight between its storage and its use, there and back."""
    split = stored.startswith("S(")
    match used:
        case "B":
            return "weight, gradient" if split else "gradient"
        case "R":
            return "weight" if split else ""
        case "P":
            return ""  # each device puts its piece among zeros
        case _:
            return "" if used == stored else "weight, gradient" if split else "gradient"


def traffic(moves: Sequence[Move], axes: Sequence[str], trained: bool = True) -> str:
    """What devices send each other of a weight in a step; `nothing` where it is used as it is stored."""
    found = {}
    for move in moves:
        words = [_use(a, b) for a, b in zip(move.before, move.after, strict=True)]
        if not trained:
            words = [text.removesuffix("gradient").removesuffix(", ") for text in words]
        for text, where in by_axis(words, axes):
            found[text if where == ",".join(axes) else f"{text} ({where})"] = None
    return "\n".join(found) or "nothing"


def collective(name: str) -> str:
    return {"none": "", "slice": "", "pad": ""}.get(name, name.replace("_", "-"))


def steps(move: Move, way: str) -> str:
    """`all-gather (x,y)` for the forward or backward way of a move."""
    order = move.steps if way == "forward" else move.steps[::-1]
    return " + ".join(f"{collective(s[way])} ({','.join(s['axes'])})" for s in order if collective(s[way]))


def mesh_text(plan: Plan) -> str:
    """`x = 2, y = 4`."""
    return ", ".join(f"{n} = {s}" for n, s in zip(plan.mesh["names"], plan.mesh["sizes"], strict=True))
