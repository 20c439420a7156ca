"""What all commands share: how they are called, how they fail, how they print and show progress."""

import functools
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import typer
from typer.core import TyperGroup

from tapas.errors import TapasError

UsageError: Any = typer.BadParameter.__base__  # typer has no public name for it


class Commands(TyperGroup):
    """All commands; what cannot be read of a command line with --json is told as JSON, too."""

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> Any:
        if "--json" not in (sys.argv[1:] if args is None else args):
            return super().main(args, **extra)
        try:
            options: dict[str, Any] = extra | {"standalone_mode": False}
            sys.exit(super().main(args, **options) or 0)
        except UsageError as error:
            mistake = TapasError("command line", error.format_message().rstrip("."), "see tapas --help")
            print(error_text(mistake, as_json=True), file=sys.stderr)
            sys.exit(2)
        except typer.Abort:
            sys.exit(1)


app = typer.Typer(
    name="tapas",
    cls=Commands,
    help="Find the fastest way to split a neural network over a cluster, with proof.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # an unexpected error is a bug: its plain traceback is wanted
    context_settings={"help_option_names": ["-h", "--help"]},
)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """A user's mistake is one line and exit code 2."""

    command.__doc__ = flowing(command.__doc__ or "")
    command = spread(command)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        as_json = bool(given.get("as_json"))
        try:
            command(**given)
        except TapasError as error:
            fail(error, as_json)
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            fail(TapasError(str(error.filename), str(error.strerror), "check the path"), as_json)

    return run


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of a group, which is a dataclass, in the place of each parameter of that type."""
    signature = inspect.signature(command)
    groups: dict[str, Any] = {p.name: p.annotation for p in signature.parameters.values() if is_dataclass(p.annotation)}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        group = groups.get(parameter.name)
        own = inspect.signature(group).parameters.values() if group else [parameter]
        parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**given, **made)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def flowing(text: str) -> str:
    """Paragraphs without the line breaks of the source; an indented one keeps them."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else p.replace("\n", " ") for p in paragraphs)


def fail(error: TapasError, as_json: bool = False, code: int = 2) -> None:
    """One line on stderr; with --json an object."""
    typer.echo(error_text(error, as_json), err=True)
    raise typer.Exit(code) from None


def error_text(error: TapasError, as_json: bool) -> str:
    parts: dict[str, Any] = {"place": error.place, "fact": error.fact, "remedy": error.remedy}
    if reasons := getattr(error, "reasons", None):  # of an export: all of them
        parts["reasons"] = list(reasons)
    text = f"error: {' '.join(str(error).split())}"
    return json.dumps({"error": {**parts, "kind": type(error).__name__}}) if as_json else text


def emit(page: Callable[[], Any], data: Callable[[], Any], as_json: bool) -> None:
    """JSON, a coloured page in a terminal, or plain text."""
    if as_json:
        typer.echo(json.dumps(data(), indent=1))
        return
    from tapas.report import print_to, text_of, width_from

    if sys.stdout.isatty():
        from rich.console import Console

        print_to(page(), Console())
    else:
        typer.echo(text_of(page(), width_from(os.environ)))


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C ends a search that is under way with the best plan so far; a second one, or one at any other time, ends
    the command."""
    from tapas.search import current_monitor

    def stop(number: int, frame: Any) -> None:
        monitor = current_monitor()
        if monitor is None or monitor.stopped:
            raise KeyboardInterrupt
        monitor.stop()
        typer.echo("stopping with the best plan so far; press Ctrl-C again to have none", err=True)

    if threading.current_thread() is not threading.main_thread():  # only that one may say what signals do
        yield
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress(stages: int) -> Iterator[Callable[[str], None]]:
    """A bar over the stages on stderr, if someone is watching. What comes after a colon says how far a stage is."""
    if not sys.stderr.isatty():
        yield lambda stage: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("start", total=stages)
        before = ""

        def step(stage: str) -> None:
            nonlocal before
            same, before = stage.partition(":")[0] == before, stage.partition(":")[0]
            bars.update(task, description=stage, advance=0 if same else 1)

        yield step
