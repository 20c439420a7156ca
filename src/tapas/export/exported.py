"""What an export gives back, and how one is refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tapas.errors import PlanError


@dataclass(frozen=True, slots=True)
class Reason:
    """Something in a plan that a format has no word for."""

    place: str  # a module or parameter
    fact: str

    def __str__(self) -> str:
        return f"{self.place}: {self.fact}"


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan as another tool reads it."""

    to: str  # the format
    text: str  # the file
    data: dict[str, Any]  # the same for machines
    notes: tuple[str, ...]  # what the format leaves to the tool; the file says so, too
    dropped: tuple[str, ...] = ()  # with `approximate`: what the plan has and the file does not
    planned_seconds: float = 0.0  # a step of the plan
    seconds: float | None = None  # a step of what the file says, by the same prices, where something was dropped

    def to_dict(self) -> dict[str, Any]:
        return {
            "to": self.to, "notes": list(self.notes), "dropped": list(self.dropped),
            "planned_seconds": self.planned_seconds, "seconds": self.seconds, "data": self.data, "text": self.text,
        }  # fmt: skip


FEW = 8  # reasons that are said in one line; the rest is counted


class CannotSay(PlanError):
    """A plan that a format cannot express: all reasons, not only the first."""

    def __init__(self, to: str, reasons: Sequence[Reason], remedy: str) -> None:
        self.reasons = grouped(reasons)
        numbered = [f"({number}) {text}" for number, text in enumerate(self.reasons[:FEW], 1)]
        more = len(self.reasons) - FEW
        numbered += [f"and {more} more, which --json lists"] if more > 0 else []
        places = len(self.reasons)
        many = "1 place that it" if places == 1 else f"{places} places that it"
        super().__init__(f"--to {to}", f"the plan has {many} has no words for: {'; '.join(numbered)}", remedy)


def grouped(reasons: Sequence[Reason]) -> list[str]:
    """By place; the same about all layers is said once."""
    facts: dict[str, dict[str, None]] = {}
    places: dict[str, set[str]] = {}
    for reason in reasons:
        pattern = starred(reason.place)
        facts.setdefault(pattern, {})[reason.fact] = None
        places.setdefault(pattern, set()).add(reason.place)
    named = {pattern: pattern if len(where) > 1 else min(where) for pattern, where in places.items()}
    return [f"{named[pattern]}: {', '.join(said)}" for pattern, said in facts.items()]


def starred(name: str) -> str:
    """A name with `*` for its numbers: `model.layers.3.mlp` -> `model.layers.*.mlp`.

    >>> starred("model.layers.3.mlp.w1")
    'model.layers.*.mlp.w1'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
