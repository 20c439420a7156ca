"""The few things all printed pages share: a table, a console for plain text, and its width."""

from collections.abc import Iterable, Sequence
from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 110  # columns of plain text
Cell = str | Text


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """A table. `>` before a column's name: figures, flushed right. `!`: names, never broken. A row `-`: a gap."""
    made = Table(
        title=Text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        padding=(0, 1, 0, 0), header_style="dim",
    )  # fmt: skip
    for name in columns:
        right, whole = name.startswith(">"), name.startswith((">", "!"))
        made.add_column(name.lstrip(">!"), justify="right" if right else "left", no_wrap=whole, overflow="fold")
    for row in rows:
        if list(row) == ["-"]:
            made.add_section()
        else:
            made.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return made


def heading(text: str, columns: int) -> tuple[Cell, ...]:
    return (Text(text, "bold cyan"), *[""] * (columns - 1))


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
