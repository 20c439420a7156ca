"""Numbers for people."""

from collections.abc import Sequence

Units = tuple[tuple[float, str], ...]
NOTHING = 5e-9  # seconds
TIME: Units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTES: Units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
COUNT: Units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def _scaled(value: float, units: Units, digits: int = 3) -> str:
    if value == 0:
        return "0"
    factor, name = next((u for u in units if abs(value) >= u[0] * 0.9995), units[-1])
    scaled = value / factor
    if units is BYTES and factor == 1.0:
        return f"{scaled:.0f} B"
    decimals = max(0, digits - len(str(int(abs(scaled) + 0.0005))))
    return f"{scaled:.{decimals}f} {name}".rstrip() if name else f"{scaled:.0f}"


def seconds(value: float) -> str:
    """What rounds to nothing is nothing."""
    return _scaled(value, TIME) if abs(value) >= NOTHING else "0"


def nbytes(value: float) -> str:
    return _scaled(value, BYTES)


def count(value: float) -> str:
    """8030261248 -> 8.03B."""
    return _scaled(value, COUNT).replace(" ", "")


def rate(value: float) -> str:
    """64623.2 -> 64.6k, 3.14159 -> 3.14."""
    return count(value) if value >= 1000 else f"{value:.3g}"


def many(value: int, what: str) -> str:
    return f"{value} {what}" if value == 1 else f"{value} {what}s"


def signed(value: float, text: str) -> str:
    return f"+{text}" if value > 0 else text.replace("-", "−") if value < 0 else text


def shape(sizes: Sequence[int]) -> str:
    return " × ".join(map(str, sizes)) or "scalar"


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.095 or share == 0 else f"{share:.1%}" if share >= 0.0005 else "<0.1%"


def bar(share: float, width: int = 20) -> str:
    return "█" * min(width, round(share * width)) or ("▏" if share > 0 else "")


def slower(ratio: float) -> str:
    """How a step compares with ours: `12% slower`, `2.4 times as long`."""
    if abs(ratio - 1) < 5e-5:
        return "as fast"
    if ratio >= 2:
        return f"{ratio:.1f} times as long"
    change = abs(ratio - 1) * 100
    figure = f"{change:.0f}" if change >= 10 else f"{change:.1f}" if change >= 0.05 else "<0.1"
    return f"{figure}% {'slower' if ratio > 1 else 'faster'}"
