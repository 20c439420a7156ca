"""Runs the benchmarks, keeps what they measured in benchmarks/results/, and writes it into docs/results.md.

    python benchmarks/results.py [NAME ...] [--page]

Without names all of them are run: a run that was stopped goes on with the first one that had not ended. With names
these are run again, and the others' results stay. A benchmark that fails, or misses what is wanted, does not end the
run: the exit status says so in the end. `--page` runs nothing and writes the page from what is there.

In the page, `<!-- table NAME TABLE -->` and `<!-- curves NAME CURVES -->` begin what is written here, and
`<!-- end -->` ends it.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from _plot import curves

from tapas.util import write_file

HERE = Path(__file__).resolve().parent
DATA, PAGE = HERE / "results", HERE.parent / "docs" / "results.md"
STATE = HERE.parent / "build" / "bench.json"  # benchmarks that have ended, with their exit status
ON_GPUS = ("gpu", "measure_gpu")  # how those begin that need a GPU and write no data, see docs/gpu.md
OPTIONS = {"published": ["--plot", "docs/published.svg"], "scaling": ["--cpu"], "planning": ["--cpu"]}
MARKER = re.compile(r"(<!-- (table|curves) (\S+) (\S+) -->\n).*?(<!-- end -->)", re.S)


def names() -> list[str]:
    found = sorted(path.stem for path in HERE.glob("[!_]*.py"))
    return [name for name in found if name != Path(__file__).stem]


# -- running --------------------------------------------------------------------------------------------


def run(name: str) -> int:
    print(f"== {name}", flush=True)
    data = [] if name.startswith(ON_GPUS) else ["--json", str(DATA / f"{name}.json")]
    command = [sys.executable, str(HERE / f"{name}.py"), *OPTIONS.get(name, []), *data]
    return subprocess.run(command, cwd=HERE.parent, check=False).returncode


def run_all() -> dict[str, int]:
    """Exit statuses; those of a run that was stopped are taken from there."""
    ended: dict[str, int] = json.loads(STATE.read_text(encoding="utf-8")) if STATE.is_file() else {}
    for name in names():
        if name not in ended:
            ended[name] = run(name)
            STATE.parent.mkdir(exist_ok=True)
            write_file(STATE, json.dumps(ended).encode())
    STATE.unlink(missing_ok=True)
    return ended


# -- the page -------------------------------------------------------------------------------------------


def table_text(data: dict[str, Any]) -> str:
    columns = [column or " " for column in data["columns"]]
    rows = [columns, ["---", *["---:"] * (len(columns) - 1)], *data["rows"]]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(["", f"**{data['title']}**", "", *lines, "", origin(data), ""])


def origin(data: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    return f"`{data['command']}`; {versions}; {data['date']}"


def curves_text(name: str, data: dict[str, Any], folder: Path) -> str:
    """The picture's place in the page; the picture itself is written beside it."""
    lines = {line: {int(x): y for x, y in points.items()} for line, points in data["lines"].items()}
    drawn = curves(data["title"], data["across"], data["up"], lines, dashed=data["dashed"])
    write_file(folder / f"{name}.svg", drawn.encode())
    return f"\n![{data['title']}: {data['up']} by {data['across']}]({name}.svg)\n"


def written(page: str, data: Path, folder: Path) -> str:
    """The page with what is in the folder `data` now; pictures go to `folder`, which the page is in."""

    def part(found: re.Match[str]) -> str:
        start, kind, name, which, end = found.groups()
        file = data / f"{name}.json"
        kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        one = kept.get("tables" if kind == "table" else "curves", {}).get(which)
        if one is None:
            return f"{start}\nNot measured yet: `make bench BENCH={name}`.\n\n{end}"
        text = table_text(one) if kind == "table" else curves_text(f"results_{name}_{which}", one, folder)
        return f"{start}{text}\n{end}"

    return MARKER.sub(part, page)


def write_page() -> None:
    text = written(PAGE.read_text(encoding="utf-8"), DATA, PAGE.parent)
    write_file(PAGE, text.encode())
    print(f"written: {PAGE.relative_to(HERE.parent)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    given = parser.parse_args()
    if unknown := set(given.names) - set(names()):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    ended = {} if given.page else {name: run(name) for name in given.names} or run_all()
    write_page()
    failed = [name for name, status in ended.items() if status]
    if failed:
        print(f"failed, or missed what was wanted: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
