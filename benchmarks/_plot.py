"""Curves on logarithmic axes, as an SVG: too little to depend on a plotting library for."""

from collections.abc import Mapping
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 210, 40, 55  # the margins; the legend is in the right one
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # told apart by all eyes


def curves(title: str, across: str, up: str, lines: Mapping[str, Mapping[int, float]], dashed: str = "") -> str:
    """`lines` maps a name to its points; the one named `dashed` is drawn so."""
    ticks = sorted({x for line in lines.values() for x in line})
    values = [y for line in lines.values() for y in line.values()]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    high = max(high, low + 1)
    first, last = log10(ticks[0]), max(log10(ticks[-1]), log10(ticks[0]) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        over, along = (log10(x) - first) / (last - first), (log10(y) - low) / (high - low)
        return LEFT + over * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - along * (HEIGHT - TOP - BOTTOM)

    def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'

    left, bottom = place(ticks[0], 10**low)
    right, top = WIDTH - RIGHT, TOP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        text((left + right) / 2, 22, title, more=' font-size="14"'),
        text((left + right) / 2, HEIGHT - 14, across),
        text(18, (top + bottom) / 2, up, more=f' transform="rotate(-90 18 {(top + bottom) / 2:.1f})"'),
    ]
    for power in range(low, high + 1):
        for step in range(1, 10 if power < high else 2):
            y = place(ticks[0], step * 10**power)[1]
            shade = "#bbb" if step == 1 else "#eee"
            parts.append(f'<path d="M{left:.1f} {y:.1f}H{right}" stroke="{shade}"/>')
        parts.append(text(left - 8, place(ticks[0], 10**power)[1] + 4, f"{10**power:g}", "end"))
    for x in ticks:
        at = place(x, 10**low)[0]
        parts += [f'<path d="M{at:.1f} {bottom:.1f}V{top}" stroke="#eee"/>', text(at, bottom + 18, f"{x:,}")]
    parts.append(f'<path d="M{left:.1f} {top}V{bottom:.1f}H{right}" fill="none" stroke="black"/>')
    for number, (name, line) in enumerate(lines.items()):
        stroke = f'stroke="{COLOURS[number % len(COLOURS)]}"' + (' stroke-dasharray="6 4"' if name == dashed else "")
        points = [place(x, line[x]) for x in sorted(line)]
        parts.append(
            f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}" fill="none" stroke-width="2" {stroke}/>'
        )
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[number % len(COLOURS)]}"/>' for x, y in points
        ]
        y = TOP + 10 + 20 * number
        parts.append(f'<path d="M{right + 14} {y}h24" stroke-width="2" {stroke}/>')
        parts.append(text(right + 44, y + 4, name, "start"))
    return "\n".join([*parts, "</svg>\n"])
