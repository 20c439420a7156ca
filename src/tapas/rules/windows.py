"""Windows that slide over positions: where they lie side by side, and where they reach over a rank's share of them.

A rank that makes m of a dim's results holds stride * m positions. It needs some more before and after these: borders,
which its neighbours have, or at the ends what the operator fills up with. They are exchanged dim by dim, each time with
the borders of those before, so that corners come along.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tapas.rules.base import BORDERED, At, Call, Collective, Factor, Halo, Kept, Kernel, Rule

Step = int | Sequence[int]
NAMES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}  # of positions, by how many dims
HALO_WORDS = {name: f"{name} (halo exchange)" for name in NAMES[1] + NAMES[3]}


@dataclass(frozen=True, slots=True)
class Reach:
    """Where positions are in the operand and in results, and what is needed of the operand besides."""

    dim: int
    taken: int  # elements of the operand for each position
    made: int  # and of results
    halo: Halo


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

    @property
    def transposed_halo(self) -> Halo:
        """Of results between the positions of a share, where these are what windows start from."""
        after = -(-self.padding // self.stride)
        return Halo(max(after, (self.span - 1 - self.padding) // self.stride), after)  # see `follows`

    def reach(self, dim: int, transposed: bool = False) -> Reach:
        return Reach(dim, 1, self.stride, self.transposed_halo) if transposed else Reach(dim, self.stride, 1, self.halo)

    def tiles(self, whole: int, made: int) -> bool:
        """Whether such windows divide a dim without overlap, gap or margin."""
        tight = self.padding == 0 and self.span == self.size
        return tight and (self.stride == self.size or made == 1) and made * self.size == whole

    def follows(self, whole: int, made: int, transposed: bool = False) -> bool:
        """Whether equal shares of positions make equal shares of results. Windows that reach farther after them than
        before, as even ones under padding="same" do, are left out: the rank that sends most would be another one."""
        if transposed:
            return whole > 1 and made == self.stride * whole and self.padding < self.span
        halo = self.halo
        filled = whole + 2 * self.padding
        return (
            made > 1 and made * self.stride == whole and halo.after <= halo.before
            and (filled - self.span) // self.stride + 1 == made
        )  # fmt: skip


def each(value: Step, dims: int) -> Sequence[int]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def windows_of(size: Step, stride: Step, padding: Step | str, dilation: Step, dims: int) -> list[Window]:
    """Dim by dim, from arguments in any spelling."""
    sizes = each(size, dims)
    spans = [d * (n - 1) + 1 for d, n in zip(each(dilation, dims), sizes, strict=True)]
    fill = [(s - 1) // 2 * (padding == "same") for s in spans] if isinstance(padding, str) else each(padding, dims)
    return [Window(*figures) for figures in zip(sizes, each(stride, dims), fill, spans, strict=True)]


def following(
    windows: Sequence[Window], padding: Step | str, whole: Sequence[int], made: Sequence[int], transposed: bool = False
) -> dict[int, str]:
    """The dims that may be dealt out although windows do not divide them, with the names of their factors: those that
    stay within a rank's share have a name as if they did."""
    names, found = NAMES[len(windows)], dict[int, str]()
    if padding == "same" and any(window.span % 2 == 0 for window in windows):
        return found  # more is filled in behind than before, which no number says
    for i, window in enumerate(windows):
        sizes = (made[i], whole[i]) if transposed else (whole[i], made[i])
        if window.follows(whole[i], made[i], transposed) and not window.tiles(*sizes):
            found[i] = names[i] if window.reach(i, transposed).halo != Halo(0, 0) else f"p{i}"
    return found


def looks_at(resized: str) -> int | None:
    """How many positions to either side an operator that resizes looks at; None: it depends on by how much."""
    name = resized.split(".")[1]
    return None if name.endswith("_aa") else 0 if "nearest" in name else 2 if "cubic" in name else 1


def with_borders(
    call: Call, rule: Rule, x: int, found: Mapping[str, Reach], saved: bool, kept: bool = False, cut: bool = False
) -> Rule:
    """`found`: by factor. `saved`: the operand `x` is kept for the backward pass, so one with its borders is. `kept`:
    so are the borders themselves by a selective block. `cut`: more is made than wanted, and cut off."""
    if not call.operands[x].elements:
        return rule

    def placed(factor: Factor) -> Factor:
        if factor.name not in found:
            return factor
        reach = found[factor.name]
        operands = tuple(At(reach.dim, reach.taken) if i == x else at for i, at in enumerate(factor.operands))
        results = tuple(At(reach.dim, reach.made) for _ in factor.results)
        least = max(1, -(-max(reach.halo.before, reach.halo.after) // reach.taken))  # no border is beyond next door
        return replace(factor, operands=operands, results=results, least=least)

    factors = tuple(map(placed, rule.factors))
    reaching = {name: reach.taken for name, reach in found.items() if reach.halo != Halo(0, 0)}
    held, made = ([f for f in factors if ats(f)] for ats in (lambda f: f.operands[x], lambda f: f.results[0]))
    others = tuple(f.name for f in held if f.name not in reaching)
    tensor = call.operands[x]
    point = tensor.nbytes // prod(f.size * reaching.get(f.name, 1) for f in held)
    bordered = (*others, *(name + BORDERED for name in reaching))
    copied: tuple[Kept, ...] = ((bordered, 2.0 * point),)
    whole = tuple(f.name for f in made), 2.0 * call.results[0].nbytes / max(prod(f.size for f in made), 1)

    def kernel(name: str) -> Kernel:
        halo, order = found[name].halo, list(reaching)
        place = order.index(name)
        later = order[place + 1 :]
        rows = (*others, *(before + BORDERED for before in order[:place]), *later)
        row = point * prod(reaching[after] for after in later)
        sent = Collective("halo", rows, row * halo.before, previous=row * halo.after)
        return Kernel(
            (sent, *[replace(sent, backward=True)] * tensor.priced),
            saved=((bordered, point),) * saved, working=((bordered, point),),
            products=((rows, row * (halo.before + halo.after)),) * kept,
            moved=(copied, (*copied, *[whole] * cut)), halo=halo, instead=x if saved else None,
        )  # fmt: skip

    return replace(rule, factors=tuple(
        replace(f, kernel=kernel(f.name) if f.name in reaching else Kernel()) if f.name in found else f for f in factors
    ))  # fmt: skip
