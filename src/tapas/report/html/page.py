"""The page itself: templates, scripts, styles and data in one file."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from tapas.plan.compare import compare
from tapas.plan.plan import Operator, Plan
from tapas.report import units
from tapas.report.html.view import View
from tapas.report.words import kind, storage, work
from tapas.util import VERSION, write_file

SCRIPTS = ("format.js", "graph_layout.js", "graph.js", "details.js", "mesh.js", "charts.js", "streams.js", "page.js")
LIBRARIES = ("dagre.min.js", "uplot.min.js")
STYLES = ("vendor/uplot.min.css", "assets/page.css")
# what would end the script that holds it, or a line of it in older browsers
ESCAPED = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def json_text(data: Any) -> str:
    """JSON that may stand inside of a script element, whatever names it holds."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(ESCAPED)


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # not worth its time to those who draw nothing

    made = Environment(
        loader=PackageLoader("tapas.report.html"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {
        "seconds": units.seconds, "nbytes": units.nbytes, "count": units.count, "percent": units.percent,
        "shape": units.shape, "slower": units.slower, "times": lambda n: f" × {n}" if n > 1 else "",
        "share": lambda part, whole: f"{100 * part / whole:.3f}%" if whole else "0%",
    }  # fmt: skip
    return made


def _asset(name: str) -> str:
    return files("tapas.report.html").joinpath(name).read_text(encoding="utf-8")


def _rendered(template: str, context: Mapping[str, Any]) -> str:
    from markupsafe import Markup

    scripts = {name: Markup(_asset(f"vendor/{name}")) for name in LIBRARIES}
    return _environment().get_template(template).render(
        libraries=scripts, licences=[Markup(_asset(f"vendor/{name.split('.')[0]}.LICENSE")) for name in LIBRARIES],
        script=Markup("\n".join(_asset(f"assets/{name}") for name in SCRIPTS)),
        style=Markup("\n".join(map(_asset, STYLES))), version=VERSION, **context,
    )  # fmt: skip


def page_html(views: Sequence[View]) -> str:
    """One plan, or two of them compared."""
    from markupsafe import Markup

    comparison = _comparison(views[0].plan, views[1].plan) if len(views) == 2 else None
    data = Markup(json_text([view.data() for view in views]))
    return _rendered("page.html", {"views": views, "data": data, "comparison": comparison})


def write_page(path: str | Path, views: Sequence[View]) -> None:
    """The file is complete or not there at all."""
    write_file(path, page_html(views).encode())


def notebook_html(plan: Plan) -> str:
    """The compact view: no scripts, and styles of its own only."""
    return _environment().get_template("notebook.html").render(view=View(plan))


def _comparison(first: Plan, second: Plan) -> dict[str, Any]:
    """Where two plans differ, in words."""
    found = compare(first, second)
    axes = first.mesh["names"], second.mesh["names"]

    def stored(layout: tuple[str, ...], names: list[str]) -> str:
        return storage(layout, names).replace("\n", ", ") if layout else "–"

    def done(op: Operator | None, names: list[str]) -> str:
        return work(op, names).replace("\n", ", ") if op else "–"

    parameters = [(d.name, stored(d.first, axes[0]), stored(d.second, axes[1])) for d in found.parameters]
    alike: dict[tuple[str, str, str], list[str]] = {}
    for d in found.operators:
        one, two = (done(op, names) for op, names in zip((d.first, d.second), axes, strict=True))
        alike.setdefault((d.name, one, two), []).append(kind(d.kind))
    operators = [
        (f"{name} ({kinds[0] if len(kinds) == 1 else f'{len(kinds)} operators'})", one, two)
        for (name, one, two), kinds in alike.items()
    ]
    ratio = second.cost / first.cost if first.cost else 1.0
    return {"parameters": parameters, "operators": operators, "ratio": ratio}
