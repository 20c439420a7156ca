"""The few things all printed pages share: a table, a console for plain text, and its width."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

WIDTH, NARROWEST = 110, 80  # columns of plain text
ROOMY = 100  # columns of a page that has some to spare


@dataclass(frozen=True)
class Name:
    """A dotted name that breaks after its dots and blanks where it is too long for its column: rich breaks at
    blanks only, and would rather cut the figures beside it."""

    text: str
    style: str = ""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max(map(len, self.text.splitlines()), default=0)
        return Measurement(min(longest, 8), longest).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [line for part in self.text.splitlines() for line in broken(part, options.max_width)]
        yield Text("\n".join(lines), self.style)


Cell = str | Text | Name


def broken(text: str, width: int) -> list[str]:
    """A name in lines of at most `width`; later lines are indented by two more."""
    indent = " " * (len(text) - len(text.lstrip()))
    lines, here = [], indent
    for piece in re.findall(r"[^. ]*[. ]*", text.lstrip()):
        if len((here + piece).rstrip()) > width and here.strip():
            lines.append(here.rstrip())
            here = indent + "  "
        while len(here) + len(piece.rstrip()) > max(width, len(indent) + 3):
            cut = max(width, len(indent) + 3) - len(here)
            cut = piece.rfind("_", 0, cut) + 1 or cut
            lines.append(here + piece[:cut])
            here, piece = indent + "  ", piece[cut:]
        here += piece
    return [*lines, here.rstrip()]


@dataclass(frozen=True)
class FitToWidth:
    """Something that is made for the width that there is."""

    render: Callable[[int], RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.render(options.max_width)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """A table. `>` before a column's name: figures, flushed right. `!`: never broken. `~`: names, broken after
    dots. A row `-`: a gap."""
    made = Table(
        title=Text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        padding=(0, 1, 0, 0), header_style="dim",
    )  # fmt: skip
    names = [name.startswith("~") for name in columns]
    for name in columns:
        right, whole = name.startswith(">"), name.startswith((">", "!"))
        made.add_column(name.lstrip(">!~"), justify="right" if right else "left", no_wrap=whole, overflow="fold")
    for row in rows:
        if list(row) == ["-"]:
            made.add_section()
        else:
            cells = zip(row, names, strict=True)
            made.add_row(*(c if not isinstance(c, str) else Name(c) if name else Text(c) for c, name in cells))
    return made


def heading(text: str, columns: int) -> tuple[Cell, ...]:
    return (Name(text, "bold cyan"), *[""] * (columns - 1))


def line(*parts: str | tuple[str, str]) -> Text:
    """A line of text; a part may be (text, style)."""
    return Text.assemble(*parts)


def page(parts: Iterable[RenderableType | None]) -> Group:
    """The parts one below the other, an empty line between them."""
    spaced: list[RenderableType] = []
    for part in parts:
        if part is not None:
            spaced += [part, Text("")]
    return Group(*spaced[:-1])


def width_from(environment: Mapping[str, str]) -> int:
    """What COLUMNS asks for where it is set, as other programs do when they write into a pipe."""
    asked = environment.get("COLUMNS", "")
    return max(int(asked), NARROWEST) if asked.isdecimal() else WIDTH


def text_of(content: RenderableType, width: int = WIDTH) -> str:
    """Without colours and codes, and without blanks at the ends of lines."""
    file = StringIO()
    console = Console(
        file=file, width=width, color_system=None, force_terminal=False, legacy_windows=False, highlight=False
    )
    console.print(content)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def print_to(content: RenderableType, console: Console) -> None:
    console.print(content, highlight=False)
