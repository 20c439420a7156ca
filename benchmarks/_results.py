"""What a benchmark measured: printed as it goes and, with `--json FILE`, kept as data for docs/results.md.

Every table keeps the command, the versions and the day that made it; a benchmark that is run again for some of its
tables leaves the others in the file as they are.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tapas.util import write_file

PACKAGES = ("torch", "transformers")
Lines = Mapping[str, Mapping[int, float]]


def parser_for(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the tables there as data, too")
    return parser


def command_line() -> str:
    """As it was called, without where files are on this machine."""
    told, skip = [f"benchmarks/{Path(sys.argv[0]).name}"], False
    for word in sys.argv[1:]:
        if not skip and word != "--json":
            told.append(Path(word).name if Path(word).is_absolute() else word)
        skip = word == "--json"
    return " ".join(told)


@dataclass
class Results:
    path: Path | None = None
    console: Console = field(default_factory=lambda: Console(width=None if sys.stdout.isatty() else 130))
    versions: dict[str, str] = field(default_factory=dict)  # of what is not a package of ours
    met: bool = True  # all that was wanted so far
    so_far: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # runs of this process
    command: str = field(default_factory=command_line)

    def table(self, name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print and keep one; those whose name is empty are only printed."""
        shown = Table(title=title)
        for number, column in enumerate(columns):
            shown.add_column(column, justify="right" if number else "left")
        for row in rows:
            shown.add_row(*row)
        self.console.print(shown)
        if name:
            self._keep("tables", name, {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]})

    def curves(self, name: str, title: str, across: str, up: str, lines: Lines, dashed: str = "") -> None:
        """Keep what is to be drawn."""
        points = {line: {str(x): y for x, y in values.items()} for line, values in lines.items()}
        self._keep("curves", name, {"title": title, "across": across, "up": up, "lines": points, "dashed": dashed})

    def runs(self, name: str, key: str, run: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Keep one of several runs that take long, so that a table can be made bit by bit: all of this day with these
        versions."""
        made = {key: value for key, value in self._origin().items() if key != "command"}
        kept = self._kept().get("runs", {}).get(name, {})
        known = kept.get("each", {}) if all(kept.get(key) == value for key, value in made.items()) else {}
        self.so_far[name] = self.so_far.get(name, {}) | known | {key: run}
        self._write("runs", name, {**made, "each": self.so_far[name]})
        return self.so_far[name]

    def want(self, what: str, measured: float, limit: float) -> bool:
        met = measured <= limit
        self.met = self.met and met
        missed = "" if met else ", MISSED"
        self.console.print(f"{what}: {measured:.3g} (wanted: at most {limit:.3g}){missed}", markup=False)
        return met

    def _keep(self, kind: str, name: str, data: dict[str, Any]) -> None:
        self._write(kind, name, {**data, **self._origin()})

    def _write(self, kind: str, name: str, data: dict[str, Any]) -> None:
        if self.path is not None:
            kept = self._kept()
            kept.setdefault(kind, {})[name] = data
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, (json.dumps(kept, indent=1) + "\n").encode())

    def _kept(self) -> dict[str, Any]:
        if self.path is None or not self.path.is_file():
            return {}
        return json.loads(self.path.read_text(encoding="utf-8"))

    def _origin(self) -> dict[str, Any]:
        packages = {name: importlib.metadata.version(name) for name in PACKAGES}
        return {
            "command": self.command,
            "versions": {"Python": platform.python_version(), **packages, **self.versions},
            "date": datetime.date.today().isoformat(),
        }
