"""Scaled dot-product attention: batch and heads, queries, query heads that share KV heads, and the sequence of queries,
keys and values at once, with keys and values passed round the devices."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tapas.ir.graph import ITEMSIZE, Tensor
from tapas.rules.base import At, Call, Collective, Factor, Kept, Kernel, Rule, Wording, rule
from tapas.rules.notation import Term, aligned, from_labels, number, placed, wide

# Queries of a causal sequence are dealt out in order: the last rank looks at all keys, the average rank
# at half of them. (It would be 2 - 1/n if a rank halved its own diagonal block, too.)
CAUSAL = Kernel(imbalance=2.0)


WIDE = 4  # bytes of float32


WORDS = {
    "h": "heads", "kv": "heads", "g": "query heads of a group", "hq": "query heads", "l": "queries", "s": "keys",
}  # fmt: skip
# what it comes down to; the last ones where nothing is fused
PRODUCTS = tuple(
    f"aten._scaled_dot_product_{name}.default"
    for name in (
        "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
) + ("aten.bmm.default", "aten.mm.default", "tapas.ring_attention.default", "tapas.exchange.default")  # fmt: skip


@rule(
    "aten.scaled_dot_product_attention.default", wording=Wording("attention", WORDS, {"ring": "sequence (ring)"}, True)
)
def attention(call: Call) -> Rule:
    """Keys, and the features within a head, are met by all queries of a head: keys are split together with the queries,
    or alone where nobody trains and they are others than the queries (a cache's), features never."""
    q, k, v = (_operand(call, i, name) for i, name in enumerate(("query", "key", "value")))
    shared = call.arg(7, "enable_gqa", False) and q.shape[-3] != k.shape[-3]
    batch: Term = [[f"d{i}"] for i in range(len(call.results[0].shape) - 2)]
    if len(batch) > 1:
        batch[-1] = ["kv", "g"] if shared else ["h"]
    heads = [*batch[:-1], ["kv"]] if shared else batch
    mask = call.tensor(call.arg(3, "attn_mask"))
    causal = call.arg(5, "is_causal", False)
    dropout, features = call.arg(4, "dropout_p", 0.0), (q.shape[-1], v.shape[-1])
    apart = not (causal or dropout or any(t.priced for t in call.operands)) and q.shape[-2] != k.shape[-2]
    keys = ["s" if apart else "!s"]
    plain = from_labels(
        placed(
            call,
            (0, "query", aligned(q.shape, [*batch, ["l"], ["!e"]])),
            (1, "key", aligned(k.shape, [*heads, keys, ["!e"]])),
            (2, "value", aligned(v.shape, [*heads, keys, ["!v"]])),
            (3, "attn_mask", aligned(mask.shape if mask else (), [*batch, ["l"], keys])),
        ),
        [[*batch, ["l"], ["!v"]]],
        call,
        {"kv": k.shape[-3], "g": q.shape[-3] // k.shape[-3]} if shared else {},
        {"l": CAUSAL} if causal else {},
        flops=(1.0 if causal else 2.0) * sum(features) / (features[0] * features[1]),
        family="attention",
        linear=((2,),) if not dropout else (),
        random=dropout > 0,
        kernel="products.attention",
        products=PRODUCTS,
        dense_rows=True,
        attended="s",
        seen=0.5 if causal else 1.0,
    )
    plain = _biased(call, plain) if mask and mask.priced else plain
    plain = _with_keys_apart(call, plain) if apart else plain
    if mask is None and not dropout and _one_sequence(q, k, v, shared):
        plain = _with_ring(call, plain, causal)
    return _with_query_heads(call, plain) if shared and k.shape[-3] > 1 else plain


def _biased(call: Call, rule: Rule) -> Rule:
    """On CPUs no fused kernel has a gradient for a bias: torch multiplies in float32, and keeps scores and operands so.
    On GPUs there is one, slower than those without a bias (`keeps` of the family says which it is)."""
    scores = tuple(f for f in rule.factors if f.name not in ("e", "v"))
    wider = sum(t.elements * max(WIDE - ITEMSIZE[t.dtype], 0) for t in call.operands[:3])
    nbytes = WIDE + wider / max(prod(f.size for f in scores), 1)
    names = tuple(f.name for f in scores)
    return replace(rule, family="unfused_attention", saved_bytes=nbytes, saved_factors=names)


def _operand(call: Call, position: int, name: str) -> Tensor:
    tensor = call.tensor(call.arg(position, name))
    assert tensor is not None
    return tensor


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, shared: bool) -> bool:
    """Whether queries, keys and values are of the same elements, and nothing but heads is shared."""
    heads = k.shape[-3:-2] if shared else q.shape[-3:-2]
    lengths = {t.shape[-2] for t in (q, k, v)}
    alike = all(t.shape[:-3] == q.shape[:-3] and t.shape[-3:-2] == heads and t.dtype == q.dtype for t in (k, v))
    return alike and len(lengths) == 1 and min(lengths) > 1


def _with_ring(call: Call, rule: Rule, causal: bool) -> Rule:
    """The sequence of queries, keys and values: a device passes on what it has of the latter, and once more for the
    gradients, which go round behind them in the precision that sums are kept in. Of a causal one devices first exchange
    pieces, early ones for late ones, so that all have the same to do; results go back to where they belong."""
    q, *others = (number(call, i, name) for i, name in enumerate(("query", "key", "value")))
    dims = {i: At(len(call.operands[i].shape) - 2) for i in (q, *others) if i is not None}
    assert q is not None
    sent, working = list[Collective](), list[Kept]()
    narrow, wider = ITEMSIZE[call.operands[q].dtype], wide(call.operands[q])
    for i in others:
        assert i is not None
        held = _of(rule, i)
        sent += [Collective("ring", held, narrow, way) for way in (False, True)]
        sent.append(Collective("ring", held, wider, True, after=True))
        working.append((held, 2 * narrow + 3 * wider))  # what comes and goes, with gradients that do and stay
    shared = 2 * narrow if "g" in _of(rule, q) else 0  # copies of keys and values for the heads that share them
    asked, made = _of(rule, q, "ring"), _of(rule, None, "ring")
    working.append((asked, wider + 3 * narrow + shared))  # sums, and gradients from one part
    forward, backward = _combined(rule, q, others, narrow, wider, shared)
    saved: tuple[Kept, ...] = ()  # besides what it is given
    products: tuple[Kept, ...] = ()
    if causal:
        exchanged = [asked, *(_of(rule, i) for i in others), made]
        sent += [Collective("all_to_all", x, narrow, way) for x in exchanged for way in (False, True)]
        working += [(x, narrow) for x in exchanged]
        copied = tuple((x, 2.0 * narrow) for x in exchanged)
        forward, backward, saved = (*forward, *copied), (*backward, *copied), ((made, narrow),)
        products = (*((x, narrow) for x in exchanged), (made, narrow))
    features = [call.operands[i].shape[-1] for i in (q, others[1] or 0)]
    filled = 2 * max(features) / sum(features)  # kernels want as many of keys as of values
    kernel = Kernel(
        tuple(sent), slower=(filled, filled), saved=saved, products=products, working=tuple(working),
        moved=(forward, backward),
    )  # fmt: skip
    length, at = call.results[0].shape[-2], At(len(call.results[0].shape) - 2)
    operands = tuple(dims.get(i) for i in range(len(call.operands)))
    return replace(rule, factors=(*rule.factors, Factor("ring", length, operands, (at,), kernel=kernel, joint="s")))


def _of(rule: Rule, operand: int | None, sequence: str | None = None) -> tuple[str, ...]:
    """The factors of an operand, or of the result; `sequence` instead of its own ("l": all of it, however it is
    split)."""
    places = [(f.name, f.results[0] if operand is None else f.operands[operand]) for f in rule.factors]
    names = [name for name, place in places if place is not None]
    return tuple(sequence if sequence and name in ("l", "s") else name for name in names)


def _combined(
    rule: Rule, q: int, others: Sequence[int | None], narrow: int, wider: int, shared: int
) -> tuple[tuple[Kept, ...], tuple[Kept, ...]]:
    """What is read and written of every part, forward and backward: results are widened and mixed with those before,
    gradients added to those before, and heads that share keys and values get their copies."""
    widened = narrow + wider if narrow != wider else 0
    forward = (_of(rule, q, "l"), float(widened + 3 * wider + shared))
    backward = [(_of(rule, q, "l"), float(narrow + 2 * wider + 2 * shared))]
    backward += [(_of(rule, i, "l"), 3.0 * wider) for i in others if i is not None]
    return (forward,), tuple(backward)


def _with_keys_apart(call: Call, rule: Rule) -> Rule:
    """Each rank looks at the keys that it has; all add up what they found, by the sums of their exponentials. Scores
    are written, in the precision that sums are kept in, and so are keys and values that are narrower."""
    q, v = (number(call, i, name) for i, name in ((0, "query"), (2, "value")))
    assert q is not None and v is not None
    wider, features = wide(call.operands[q]), call.operands[v].shape[-1]
    asked = tuple(name for name in _of(rule, None) if name != "v")
    scores, held = ((*asked, "s"), 4.0 * wider), _of(rule, v)
    widened = (held, 2.0 * (wider + ITEMSIZE[call.operands[v].dtype]) * (wider != ITEMSIZE[call.operands[v].dtype]))
    kernel = Kernel(
        (Collective("all_reduce", asked, wider), Collective("all_reduce", asked, wider * (features + 1))),
        results=("R",), working=((scores[0], 2.0 * wider), (held, widened[1])), moved=((scores, widened), ()),
    )  # fmt: skip
    return replace(rule, factors=tuple(replace(f, kernel=kernel) if f.name == "s" else f for f in rule.factors))


def _with_query_heads(call: Call, rule: Rule) -> Rule:
    """Query heads alone, with all KV heads at hand: for more devices than KV heads."""
    dim, heads = len(call.results[0].shape) - 3, call.results[0].shape[-3]

    def place(position: int, name: str) -> At | None:
        tensor = call.tensor(call.arg(position, name))
        at = len(tensor.shape) - 3 if tensor else -1
        return At(at) if tensor and at >= 0 and tensor.shape[at] == heads else None

    operands: list[At | None] = [None] * len(call.operands)
    for position, name in ((0, "query"), (3, "attn_mask")):
        index = number(call, position, name)
        if index is not None:
            operands[index] = place(position, name)
    # what is sent where keys are split is counted by the heads' own factors
    alone = Factor("hq", heads, tuple(operands), (At(dim),), kernel=Kernel(), without=("s", "ring"))
    # The query heads are now counted twice among the factors.
    return replace(rule, factors=(*rule.factors, alone), flops=rule.flops / heads)
