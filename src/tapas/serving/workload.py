"""What is served at a time."""

from dataclasses import dataclass

from tapas.errors import TapasError

LEAST = {"batch": 1, "prompt": 2, "new": 1}  # a prompt of one token looks like a step that decodes


@dataclass(frozen=True, slots=True)
class Workload:
    """So many prompts of so many tokens at most, each continued by so many."""

    batch: int
    prompt: int
    new: int

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise TapasError(f"{name} {value}", f"is not a number from {least} on", f"give {least} or more")

    @property
    def steps(self) -> int:
        """That decode: the first token comes from the prefill."""
        return self.new - 1

    def __str__(self) -> str:
        return f"{self.batch} prompts of {self.prompt} tokens, {self.new} new ones each"
