"""Attention over a window: a query looks at keys within a distance of its own place. Who has a part of the sequence
needs of others no more than that."""

from dataclasses import replace
from math import prod

from tapas.ir.graph import ITEMSIZE
from tapas.rules.attention import PRODUCTS, WORDS
from tapas.rules.base import BORDERED, At, Call, Collective, Factor, Halo, Kept, Kernel, Rule, Wording, rule
from tapas.rules.notation import Term, from_labels, real

NEAR = "near"  # the factor


@rule("tapas.window_attention.default", wording=Wording("attention", WORDS, {NEAR: "sequence (neighbours)"}, True))
def window_attention(call: Call) -> Rule:
    """query, key, value, before, after. Kernels compute all scores, and leave out those that the mask forbids; ranks
    that have a part of the queries give them no other keys than those of its window."""
    q, _, v = call.operands
    batch: Term = [[f"d{i}"] for i in range(len(q.shape) - 2)]
    if len(batch) > 1:
        batch[-1] = ["h"]
    halo, length, features = Halo(*call.args[3:5]), q.shape[-2], (q.shape[-1], v.shape[-1])
    reach = (halo.before + halo.after) / max(length, 1)
    # of n ranks, one computes 1/n + reach of what it would with all keys
    narrow = Kernel(imbalance=reach, lighter=-1.0) if 2 * reach <= 1 else Kernel()
    plain = from_labels(
        [[*batch, ["l"], ["!e"]], [*batch, ["!s"], ["!e"]], [*batch, ["!s"], ["!v"]]], [[*batch, ["l"], ["!v"]]], call,
        kernels={"l": narrow}, flops=2.0 * sum(features) / max(prod(features), 1), family="attention", linear=((2,),),
        kernel="window_attention.attention", products=PRODUCTS, dense_rows=True, attended="s", saved_bytes=1.0,
        saved_factors=real("ls", (length, length)) or (),
    )  # fmt: skip
    least = max(halo.before, halo.after, 1)
    if halo.after > halo.before or length < 2 * least or not all(t.elements for t in call.operands):
        return plain
    return replace(plain, factors=(*plain.factors, _near(call, plain, halo, length, narrow, least)))


def _near(call: Call, rule: Rule, halo: Halo, length: int, narrow: Kernel, least: int) -> Factor:
    """Queries, keys and values: of the latter, neighbours send what is within reach. What lies beside each other is
    kept, and the mask of that."""
    sent, copied, borders = list[Collective](), list[Kept](), list[Kept]()
    for i in (1, 2):
        held = tuple(f.name for f in rule.factors if f.operands[i] and f.name != "s")
        row = ITEMSIZE[call.operands[i].dtype]
        there = Collective("halo", held, row * halo.before, previous=row * halo.after)
        sent += [there, *[replace(there, backward=True)] * call.operands[i].priced]
        copied.append(((*held, NEAR + BORDERED), row))
        borders.append((held, row * (halo.before + halo.after)))
    mask = ((NEAR, NEAR + BORDERED), 1.0), (("l", "s"), -1.0)
    moved = tuple((factors, 2.0 * nbytes) for factors, nbytes in copied)
    kernel = replace(
        narrow, collectives=tuple(sent), saved=(*copied, *mask), working=tuple(copied), products=(*borders, *mask),
        moved=(moved, moved), halo=halo,
    )  # fmt: skip
    at = At(len(call.results[0].shape) - 2)
    return Factor(NEAR, length, (at,) * 3, (at,), kernel=kernel, joint="s", least=least)
