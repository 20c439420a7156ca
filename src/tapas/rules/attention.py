"""Scaled dot-product attention: batch and heads, queries, and query heads that share KV heads."""

from dataclasses import replace
from math import prod

from tapas.ir.graph import ITEMSIZE, Tensor
from tapas.rules.base import At, Call, Factor, Kernel, Rule, Wording, rule
from tapas.rules.notation import Term, aligned, from_labels, number, placed

# Queries of a causal sequence are dealt out in order: the last rank looks at all keys, the average rank
# at half of them. (It would be 2 - 1/n if a rank halved its own diagonal block, too.)
CAUSAL = Kernel(imbalance=2.0)


WIDE = 4  # bytes of float32


WORDS = {"h": "heads", "kv": "heads", "g": "query heads of a group", "hq": "query heads", "l": "queries"}
# what it comes down to; the last ones where nothing is fused
PRODUCTS = tuple(
    f"aten._scaled_dot_product_{name}.default"
    for name in (
        "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
) + ("aten.bmm.default", "aten.mm.default")  # fmt: skip


@rule("aten.scaled_dot_product_attention.default", wording=Wording("attention", WORDS, listed=True))
def attention(call: Call) -> Rule:
    """Keys, and the features within a head, are met by all queries of a head: they are not split."""
    q, k, v = (_operand(call, i, name) for i, name in enumerate(("query", "key", "value")))
    shared = call.arg(7, "enable_gqa", False) and q.shape[-3] != k.shape[-3]
    batch: Term = [[f"d{i}"] for i in range(len(call.results[0].shape) - 2)]
    if len(batch) > 1:
        batch[-1] = ["kv", "g"] if shared else ["h"]
    heads = [*batch[:-1], ["kv"]] if shared else batch
    mask = call.tensor(call.arg(3, "attn_mask"))
    causal = call.arg(5, "is_causal", False)
    dropout, features = call.arg(4, "dropout_p", 0.0), (q.shape[-1], v.shape[-1])
    plain = from_labels(
        placed(
            call,
            (0, "query", aligned(q.shape, [*batch, ["l"], ["!e"]])),
            (1, "key", aligned(k.shape, [*heads, ["!s"], ["!e"]])),
            (2, "value", aligned(v.shape, [*heads, ["!s"], ["!v"]])),
            (3, "attn_mask", aligned(mask.shape if mask else (), [*batch, ["l"], ["!s"]])),
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
    alone = Factor("hq", heads, tuple(operands), (At(dim),), kernel=Kernel())
    # The query heads are now counted twice among the factors.
    return replace(rule, factors=(*rule.factors, alone), flops=rule.flops / heads)
