"""Windows that slide over positions: where they lie side by side, and where they reach over a rank's share of them.

A rank that makes m of a dim's results holds stride * m positions. It needs some more before and after these: borders,
which its neighbours have, or at the ends what the operator fills up with. They are exchanged dim by dim, each time with
the borders of those before, so that corners come along.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tapas.ir.graph import ITEMSIZE
from tapas.rules.base import BORDERED, At, Call, Collective, Factor, Halo, Kernel, Rule

Step = int | Sequence[int]
NAMES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}  # of positions, by how many dims
HALO_WORDS = {name: f"{name} (halo exchange)" for name in NAMES[1] + NAMES[3]}


@dataclass(frozen=True, slots=True)
class Window:
    """Along one dim."""

    size: int
    stride: int
    padding: int  # before the first position
    span: int  # from its first position to its last one

    @property
    def halo(self) -> Halo:
        return Halo(self.padding, max(0, self.span - self.stride - self.padding))

    def tiles(self, whole: int, made: int) -> bool:
        """Whether such windows divide a dim without overlap, gap or margin."""
        tight = self.padding == 0 and self.span == self.size
        return tight and (self.stride == self.size or made == 1) and made * self.size == whole

    def follows(self, whole: int, made: int) -> bool:
        """Whether equal shares of positions make equal shares of results. Windows that reach farther after them than
        before, as even ones under padding="same" do, are left out: the rank that sends most would be another one."""
        halo = self.halo
        filled = whole + 2 * self.padding
        return (
            made > 1 and made * self.stride == whole and halo.after <= halo.before
            and (filled - self.span) // self.stride + 1 == made
        )  # fmt: skip


def _each(value: Step, dims: int) -> Sequence[int]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def windows_of(size: Step, stride: Step, padding: Step | str, dilation: Step, dims: int) -> list[Window]:
    """Dim by dim, from arguments in any spelling."""
    sizes = _each(size, dims)
    spans = [d * (n - 1) + 1 for d, n in zip(_each(dilation, dims), sizes, strict=True)]
    fill = [(s - 1) // 2 * (padding == "same") for s in spans] if isinstance(padding, str) else _each(padding, dims)
    return [Window(*figures) for figures in zip(sizes, _each(stride, dims), fill, spans, strict=True)]


def following(
    windows: Sequence[Window], padding: Step | str, whole: Sequence[int], made: Sequence[int]
) -> dict[int, str]:
    """The dims that may be dealt out although windows do not divide them, with the names of their factors: those that
    stay within a rank's share have a name as if they did."""
    names = NAMES[len(windows)]
    if padding == "same" and any(window.span % 2 == 0 for window in windows):
        return {}  # more is filled in behind than before, which no number says
    return {
        i: names[i] if window.halo != Halo(0, 0) else f"p{i}"
        for i, window in enumerate(windows)
        if window.follows(whole[i], made[i]) and not window.tiles(whole[i], made[i])
    }


def looks_at(resized: str) -> int | None:
    """How many positions to either side an operator that resizes looks at; None: it depends on by how much."""
    name = resized.split(".")[1]
    return None if name.endswith("_aa") else 0 if "nearest" in name else 2 if "cubic" in name else 1


def with_borders(
    call: Call, rule: Rule, x: int, found: Mapping[str, tuple[int, int, Halo]], saved: bool, kept: bool = False
) -> Rule:
    """`found`: factors of results, with the dim of the operand `x` that follows them, its stride, and what they need of
    it besides. `saved`: the operand is kept for the backward pass, and so is one with its borders. `kept`: so are the
    borders themselves by a selective block."""
    if not call.operands[x].elements:
        return rule

    def placed(factor: Factor) -> Factor:
        if factor.name not in found:
            return factor
        dim, stride, halo = found[factor.name]
        operands = tuple(At(dim, stride) if i == x else at for i, at in enumerate(factor.operands))
        least = max(1, -(-max(halo.before, halo.after) // stride))  # no border is farther away than next door
        return replace(factor, operands=operands, least=least)

    factors = tuple(map(placed, rule.factors))
    reaching = {name: stride for name, (_, stride, halo) in found.items() if halo != Halo(0, 0)}
    held = [f for f in factors if f.operands[x] is not None]
    others = tuple(f.name for f in held if f.name not in reaching)
    tensor, itemsize = call.operands[x], ITEMSIZE[call.operands[x].dtype]
    units = prod(f.size * reaching.get(f.name, 1) for f in held)
    point = itemsize * (tensor.elements // units)
    bordered = (*others, *(name + BORDERED for name in reaching))
    copied = ((bordered, 2.0 * point),)

    def kernel(name: str) -> Kernel:
        halo, order = found[name][2], list(reaching)
        place = order.index(name)
        later = order[place + 1 :]
        rows = (*others, *(before + BORDERED for before in order[:place]), *later)
        row = point * prod(reaching[after] for after in later)
        sent = Collective("halo", rows, row * halo.before, previous=row * halo.after)
        return Kernel(
            (sent, *[replace(sent, backward=True)] * tensor.priced),
            saved=((bordered, point),) * saved, working=((bordered, point),),
            products=((rows, row * (halo.before + halo.after)),) * kept,
            moved=(copied, copied), halo=halo, instead=x if saved else None,
        )  # fmt: skip

    return replace(rule, factors=tuple(
        replace(f, kernel=kernel(f.name) if f.name in reaching else Kernel()) if f.name in found else f for f in factors
    ))  # fmt: skip
