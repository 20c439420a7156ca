"""Pictures as files, SVG or PNG.

matplotlib is only asked for here and where something is drawn: it is not worth its size to those who draw nothing.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

from tapas.errors import TapasError
from tapas.util import check_target, write_file

FORMATS = (".svg", ".png")
DOTS = 160  # per inch of a PNG
# texts stay texts, and the same curve is the same file
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "tapas", "font.size": 10}


def check_plot(path: Path) -> None:
    """Refuse what cannot be drawn or written, before any work is done for it."""
    if path.suffix.lower() not in FORMATS:
        kind = f"pictures of the kind {path.suffix}" if path.suffix else "pictures without a kind"
        raise TapasError(f"--plot {path}", f"{kind} are not drawn", f"end its name in {' or '.join(FORMATS)}")
    check_target(path)
    _matplotlib(path)


def _matplotlib(path: Path) -> Any:
    try:
        import matplotlib
    except ImportError:
        remedy = "pip install 'tapas-parallel[plot]', or leave --plot out"
        raise TapasError(f"--plot {path}", "matplotlib is not installed", remedy) from None
    return matplotlib


def save_picture(figure: Any, path: Path) -> None:
    """Write one of matplotlib's figures; the file is complete or not there at all."""
    kind, content = path.suffix.lower()[1:], BytesIO()
    with _matplotlib(path).rc_context(STYLE):
        figure.savefig(content, format=kind, dpi=DOTS, metadata={"Date" if kind == "svg" else "Software": None})
    write_file(path, content.getvalue())
