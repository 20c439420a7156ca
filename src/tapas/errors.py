"""Errors for users: each says where it happened, what is the case, and what to do about it."""


class TapasError(Exception):
    """A mistake in what TAPAS was given. The command line prints it and exits with code 2."""

    def __init__(self, place: str, fact: str, remedy: str = "") -> None:
        self.place, self.fact, self.remedy = place, fact, remedy
        super().__init__(f"{place}: {fact}" + (f"; {remedy}" if remedy else ""))


class CaptureError(TapasError):
    """The model cannot be turned into a graph."""


class GraphError(TapasError):
    """A graph that does not verify: a defect of TAPAS rather than of the model."""


class ClusterError(TapasError):
    """A mesh or cluster description that makes no sense."""


class PlanError(TapasError):
    """A plan file that cannot be read, or a pin that cannot be honoured."""


def nearest(name: str, known: list[str], count: int = 3) -> str:
    """ "did you mean ...?" for a misspelt name, or the known names when nothing is near."""
    import difflib

    near = difflib.get_close_matches(str(name), known, count, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known[:40])}"
