"""A search that is watched: how far it has come, and whether it has to stop.

What takes long lies deep (a contraction inside of a search at prices inside of a search within limits), so a monitor
is not handed down but belongs to the context: whoever works passes a `checkpoint` now and then, and is thrown out there
once the time is up or somebody has asked to stop. Whoever has a plan by then hands it back.
"""

from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from time import monotonic

TIME = "time limit"
INTERRUPTED = "interrupted"


class Stopped(Exception):
    """The search has to end, now."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    seconds: float  # since the search began
    cost: float  # of the best plan so far; infinite if there is none
    bound: float  # no plan costs less

    @property
    def gap(self) -> float:
        """Relative to the cost."""
        return 1.0 if self.cost == float("inf") else max(0.0, 1 - self.bound / self.cost) if self.cost else 0.0


class Monitor:
    """Watches the searches inside of its `with` block.

    >>> with Monitor(seconds=0.0) as monitor:
    ...     try:
    ...         checkpoint()
    ...     except Stopped:
    ...         print(monitor.why)
    time limit
    """

    def __init__(self, seconds: float | None = None, show: Callable[[LogEntry], None] = lambda entry: None) -> None:
        self.began = monotonic()
        self.until = float("inf") if seconds is None else self.began + seconds
        self.show = show
        self.why = ""  # it stopped
        self._tokens: list[Token[Monitor | None]] = []

    def __enter__(self) -> "Monitor":
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _current.reset(self._tokens.pop())

    def stop(self, why: str = INTERRUPTED) -> None:
        self.why = self.why or why

    @property
    def seconds(self) -> float:
        return monotonic() - self.began

    @property
    def stopped(self) -> bool:
        if not self.why and monotonic() >= self.until:
            self.stop(TIME)
        return bool(self.why)


_current: ContextVar[Monitor | None] = ContextVar("monitor", default=None)


def current_monitor() -> Monitor | None:
    """None where nobody watches."""
    return _current.get()


def checkpoint() -> None:
    """Here a search that has to end does."""
    monitor = _current.get()
    if monitor is not None and monitor.stopped:
        raise Stopped


class SearchLog:
    """What a search has come to, whenever that gets better; whoever watches is shown it, if he is to."""

    def __init__(self, shown: bool = True) -> None:
        self.began, self.shown = monotonic(), shown
        self.entries: list[LogEntry] = []

    def note(self, cost: float, bound: float) -> None:
        last = self.entries[-1] if self.entries else None
        if last is None or cost < last.cost or bound > last.bound:
            self.entries.append(LogEntry(monotonic() - self.began, cost, bound))
            if self.shown and (monitor := _current.get()) is not None:
                monitor.show(self.entries[-1])


def unwatched() -> Monitor:
    """For the little that has to be done even after the end."""
    return Monitor()
