"""Products of matrices: linear, mm, bmm, matmul, addmm, einsum, ..., recurrent layers and experts."""

from dataclasses import replace
from typing import Any

from tapas.ir.gating import ALONE, HALVES, PAIRS, Gating, gating_of
from tapas.ir.graph import ITEMSIZE, Ref, refs
from tapas.rules.base import BORDERED, At, Call, Collective, Factor, Kernel, Rule, Wording, rule
from tapas.rules.notation import Term, aligned, broadcast, distinct, einsum, from_labels, names, real


def product(call: Call, terms: list[Term], result: Term, added: int | None = None, **options) -> Rule:
    """Contractions count a multiplication and an addition a point. What is added (a bias) must be added
    once, not once a rank: where the sum is split, `added` is a partial sum as well."""
    kernels = {}
    if added is not None:
        present = {label for dim in (*terms[added], *result) for label in dim}
        override = tuple("P" if i == added else None for i in range(len(terms)))
        kernels = {
            label: Kernel(operands=override) for t in terms for dim in t for label in dim if label not in present
        }
    summed = {label for t in terms for dim in t for label in dim} - {label for dim in result for label in dim}
    products = PRODUCTS if summed - {"1"} else ()  # else it comes down to a pointwise product
    return from_labels(terms, [result], call, kernels=kernels, flops=2.0, products=products, added=added, **options)


WORDS = Wording(factors={"n": "output features", "k": "input features", "m": "rows"})
# what they come down to
PRODUCTS = tuple(
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addbmm")
)


@rule("aten.linear.default", wording=WORDS)
def linear(call: Call) -> Rule:
    batch = names(call.rank - 1)
    terms: list[Term] = [[*batch, ["k"]], [["n"], ["k"]] if len(call.operands[1].shape) == 2 else [["k"]]]
    result: Term = [*batch, *terms[1][:-1]]
    if len(call.operands) == 2:
        return product(call, terms, result, linear=((0,),))  # weights are never partial sums
    return product(call, [*terms, terms[1][:-1]], result, added=2, linear=((0, 2),))


@rule("tapas.affine.default", wording=replace(WORDS, name="linear"))
def affine(call: Call) -> Rule:
    """A linear layer whose weight is stored the other way round."""
    batch = names(call.rank - 1)
    terms: list[Term] = [[*batch, ["k"]], [["k"], ["n"]], [["n"]]]
    return product(call, terms, [*batch, ["n"]], added=2, linear=((0, 2),))


@rule("aten.mv.default", "aten.dot.default", "aten.vdot.default")
@rule("aten.mm.default", wording=WORDS)
@rule("aten.bmm.default", "aten.matmul.default", wording=replace(WORDS, listed=True))
def matmul(call: Call) -> Rule:
    left, right = (call.operands[call.args[i].index].shape for i in (0, 1))
    one, two = _matmul_terms(left, right, call.results[0].shape)
    result = [*names(_batch(left, right)), *one[1], *two[1]]
    # torch multiplies a row by a matrix as two matrices, and then changes the shape of the result in place
    made = product(call, [one[0], two[0]], result, linear=((0,), (1,)))
    return replace(made, products=()) if len(left) == 1 and len(right) > 1 else made


def _batch(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return max(len(left) - 2, len(right) - 2, 0)


def _matmul_terms(left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]):
    """Labels of both operands, each with the labels it alone gives to the result."""
    batch = result[: _batch(left, right)]
    rows: Term = [["m"]] if len(left) > 1 else []
    columns: Term = [["n"]] if len(right) > 1 else []
    one = [*broadcast(left[:-2], batch), *rows, ["k"]]
    two = [*broadcast(right[:-2], batch), ["k"], *columns]
    return (one, rows), (two, columns)


@rule("aten.outer.default", "aten.ger.default")
def outer(call: Call) -> Rule:
    return product(call, [[["m"]], [["n"]]], [["m"], ["n"]], linear=((0,), (1,)))


@rule("aten.addmv.default", "aten.addbmm.default")
@rule("aten.addmm.default", "aten.baddbmm.default", wording=WORDS)
def addmm(call: Call) -> Rule:
    terms: dict[str, list[Term]] = {
        "addmm": [[["m"], ["k"]], [["k"], ["n"]], [["m"], ["n"]]],
        "baddbmm": [[["b"], ["m"], ["k"]], [["b"], ["k"], ["n"]], [["b"], ["m"], ["n"]]],
        "addmv": [[["m"], ["k"]], [["k"]], [["m"]]],
        "addbmm": [[["b"], ["m"], ["k"]], [["b"], ["k"], ["n"]], [["m"], ["n"]]],
    }
    one, two, result = terms[call.target.split(".")[1]]
    return product(call, [aligned(call.operands[0].shape, result), one, two], result, added=0, linear=((0, 1),))


@rule("aten.einsum.default", wording=Wording(listed=True))
def einsum_operator(call: Call) -> Rule:
    """The labels are the equation's own; `...` stands for as many leading labels as fit."""
    equation = call.args[0].replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    operands = [call.operands[i] for i in refs(call.args[1])]
    ellipsis = max(len(t.shape) - len(e.replace("...", "")) for e, t in zip(inputs.split(","), operands, strict=True))
    letters = [c for c in inputs.replace("...", "") if c != ","]
    if not arrow:
        output = "..." * ("..." in inputs) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    whole = call.results[0].shape

    def expand(term: str, shape: tuple[int, ...]) -> Term:
        before, dots, after = term.partition("...")
        count = len(shape) - len(before) - len(after) if dots else 0
        many = [[f"e{i}"] for i in range(ellipsis - count, ellipsis)]
        return [*([c] for c in before), *many, *([c] for c in after)]

    terms = [expand(term, t.shape) for term, t in zip(inputs.split(","), operands, strict=True)]
    result = expand(output, whole)
    largest: dict[str, int] = {}
    twice = {c for term in inputs.split(",") for c in term if term.count(c) > 1 and c != "."}  # a diagonal
    for term, t in zip([*terms, result], [*operands, call.results[0]], strict=True):
        for dim, size in zip(term, t.shape, strict=True):
            largest[dim[0]] = max(size, largest.get(dim[0], 1))

    def place(term: Term, shape: tuple[int, ...]) -> Term:
        named = [["1"] if size != largest[d[0]] else d for d, size in zip(term, shape, strict=True)]
        return [["!" + d[0]] if d[0] in twice else d for d in named]

    placed = [place(term, t.shape) for term, t in zip(terms, operands, strict=True)]
    # the same tensor may be named twice: then it is one operand with two places, of which neither is split
    if sorted(refs(call.args[1])) != list(range(len(call.operands))):
        return Rule()
    return product(call, placed, place(result, whole), linear=tuple((i,) for i in range(len(operands))))


@rule("aten.chain_matmul.default", "aten.linalg_multi_dot.default")
def chain(call: Call) -> Rule:
    tensors = [call.operands[r.index] for r in call.args[0] if isinstance(r, Ref)]
    terms = [[[f"c{i}"], [f"c{i + 1}"]] for i in range(len(tensors))]
    linear = tuple((i,) for i in range(len(tensors)))
    return from_labels(terms, [[["c0"], [f"c{len(tensors)}"]]], call, linear=linear, products=PRODUCTS)


# ---------------------------------------------------------------------------------------------
# Recurrent layers as one operator: samples. Steps follow one another, and features meet in every step


@rule("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
def recurrent(call: Call) -> Rule:
    """input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first."""
    shape = call.operands[0].shape
    turned = bool(call.args[8])
    flops = recurrent_flops(call, call.args[2], shape[1 if turned else 0])
    random = call.args[5] > 0 and bool(call.args[6])
    sequence: Term = [["b"], ["1"], ["1"]] if turned else [["1"], ["b"], ["1"]]
    return _samples(call, sequence, [["1"], ["b"], ["1"]], sequence, flops, random)


@rule("aten.lstm_cell.default", "aten.gru_cell.default", "aten.rnn_tanh_cell.default", "aten.rnn_relu_cell.default")
def cell(call: Call) -> Rule:
    """A single step: input, hx, and the weights one by one."""
    flops = recurrent_flops(call, call.args[2:], 1)
    states: Term = [["b"], ["1"]]
    return _samples(call, states, states, states, flops, False)


def _samples(call: Call, given: Term, states: Term, made: Term, flops: float, random: bool) -> Rule:
    operands: list[Term | None] = [None] * len(call.operands)
    operands[0] = given
    for index in refs((call.args[1],)):
        operands[index] = states
    results = [made, *[states] * (len(call.results) - 1)]
    return from_labels(operands, results, call, flops=flops, random=random)


def recurrent_flops(call: Call, weights: Any, steps: int) -> float:
    """In every step a sample passes through every matrix once."""
    shapes = [call.operands[i].shape for i in refs(weights)]
    return 2.0 * steps * sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)


# ---------------------------------------------------------------------------------------------
# Grouped products and whole expert layers

GROUPED_WORDS = Wording(factors={"e": "experts", "t": "tokens", "k": "input features", "n": "output features"})


@rule("aten._grouped_mm.default", wording=GROUPED_WORDS)
def grouped_mm(call: Call) -> Rule:
    """Its operands' rows must start at multiples of 16 bytes: features are dealt out in such steps."""
    return _grouped(call, 16 // ITEMSIZE[call.operands[0].dtype])


@rule("transformers.grouped_mm_fallback.default", wording=GROUPED_WORDS)
def grouped_mm_fallback(call: Call) -> Rule:
    return _grouped(call, 1)


def _grouped(call: Call, step: int) -> Rule:
    """Rows sorted by expert, times their expert's matrix: every row meets one expert, not all of them."""
    ranks = tuple(len(t.shape) for t in call.operands)
    if ranks not in ((2, 3, 1), (3, 3)) or not distinct(call):
        return Rule()
    count, depth, width = call.operands[1].shape
    sizes = {"k": depth // step, "n": width // step, "a": step, "b": step}
    if ranks == (3, 3):
        return einsum("e m (k !a), e (k !a) (n !b) -> e m (n !b)", call, sizes, flops=2.0, linear=((0,), (1,)),
                      family="grouped_matmul",
                      kernels={label: Kernel() for label in "emkn"}, kernel="products.channelwise",
                      products=(call.target,))  # fmt: skip
    return einsum(
        "t (k !a), e (k !a) (n !b), 1 -> t (n !b)", call, sizes, flops=2.0 / count, linear=((0,), (1,)),
        family="grouped_matmul", kernels=_busiest("tkn"), kernel="products.grouped_mm", products=(call.target,),
    )  # fmt: skip


EXPERTS = "tapas.experts_kept.default"  # what a rank calls
DISPATCH = "dispatch"  # the factor
# The most loaded rank's rows over the mean: an assumption. Routers are trained to be even, by a loss or a bias, and
# come near it; but some rank always has more than its share, and the others wait for it.
IMBALANCE = 1.2


def _busiest(others: str) -> dict[str, Kernel]:
    """Experts that are split, with the rows that they have got, and other factors, of which all have as much."""
    return {"e": Kernel(imbalance=IMBALANCE), **{label: Kernel() for label in others}}


ROWS_MOVED = (7, 9)  # how often a slot's row is read or written around the products, forward and backward
EXPERT_WORDS = {"e": "experts", "t": "tokens", "f": "features inside the experts", "k": "experts of a token"}
SENT = {DISPATCH: "experts, tokens sent (all-to-all)"}


@rule("tapas.experts.default", wording=Wording(factors=EXPERT_WORDS, joint=SENT))
def experts(call: Call) -> Rule:
    """hidden, index, weight, gate_up, down, and biases of the latter: tokens, their slots, experts, or the features
    inside an expert.

    Features of the result could be split as well, but gate_up would be repeated on every rank. Kept are gate and up of
    every slot, also of those whose experts are elsewhere: how many these are is known to the device only.
    """
    gating, (count, width) = gating_of(call.args[5]), _experts_and_width(call)
    biased, hidden = len(call.operands) > 5, call.operands[0].shape[1]
    kept = real("tkf", (*call.operands[1].shape, width)) or ()
    # rows are gathered for slots and put back, scaled and summed by every rank that has some of an expert's features
    rows = real("tk", call.operands[1].shape) or ()
    ahead, back = (((rows, times * hidden * ITEMSIZE[call.operands[0].dtype]),) for times in ROWS_MOVED)
    # what is added to partial sums is added once
    kernels = _busiest("tk") | {"f": Kernel(operands=(*[None] * 6, "P") if biased else (), moved=(ahead, back))}
    weights = "e !h 1, e f !o" if gating.transposed else "e 1 !h, e !o f"
    plain = einsum(
        f"t !h, t k, t k, {weights}{', e 1, e !o' if biased else ''} -> t !o", call,
        flops=2.0 * (gating.parts + 1) / (count * hidden), linear=((2,), (4, 6) if biased else (4,)),
        kernels=kernels, kernel="dispatch.experts", target=EXPERTS,
        products=("tapas.experts_forward.default", "tapas.exchange.default", "tapas.largest.default"),
        saved_factors=kept, saved_bytes=gating.parts * ITEMSIZE[call.operands[3].dtype], family="grouped_matmul",
    )  # fmt: skip
    factors = tuple(replace(f, operands=_packed(f.operands, gating)) if f.name == "f" else f for f in plain.factors)
    return replace(plain, factors=(*factors, *_dispatch(call)))


def _experts_and_width(call: Call) -> tuple[int, int]:
    count, *features = call.operands[4].shape
    return count, features[0 if gating_of(call.args[5]).transposed else 1]


def _packed(operands: tuple[At | None, ...], gating: Gating) -> tuple[At | None, ...]:
    """Gate and up lie one after the other, or in turn: both are split like the features of down."""
    dims = {3: 2 if gating.transposed else 1, 5: 1}
    inner, repeat = {HALVES: (1, 2), PAIRS: (2, 1), ALONE: (1, 1)}[gating.packing]
    return tuple(At(dims[i], inner, repeat=repeat) if i in dims else at for i, at in enumerate(operands))


def _dispatch(call: Call) -> tuple[Factor, ...]:
    """Tokens and experts split over one axis, tokens sent to their experts and back. Each row is sent four times: there
    and back, and so its gradients. Routing weights travel with the rows, and counts ahead of them. Rows that arrived
    are kept for the backward pass, and so is what the operator keeps of those that are more than its share.

    With a capacity what is sent are buffers of a size that is known, and all ranks tell each other whether one has more
    for another than fits; no rank has more to compute than that."""
    hidden, index, weight, gate_up, *_ = call.operands
    (tokens, slots), (count, inside), width = index.shape, _experts_and_width(call), hidden.shape[1]
    if min(tokens, count) < 2 or not slots or not width:
        return ()
    capacity = call.arg(8, "capacity") or 0.0
    held = 1.0 if capacity else IMBALANCE  # rows of a rank over what they are counted by

    def points(factors: str, *sizes: int) -> tuple[str, ...]:
        found = real(factors, (tokens, slots, *sizes)) or ()
        return tuple(DISPATCH + BORDERED if name == "t" and capacity else name for name in found)

    def sent(factors: tuple[str, ...], itemsize: int, backward: bool = False) -> Collective:
        return Collective("all_to_all", factors, itemsize, backward, held)

    rows, scales, inner = points("tkh", width), points("tk"), points("tkf", inside)
    nbytes, wide = ITEMSIZE[hidden.dtype], ITEMSIZE[weight.dtype]
    messages = [Collective("all_to_all", ("e",), 8), *[sent(rows, nbytes)] * 2, sent(scales, wide)]
    messages += [Collective("all_reduce", (), 8, everywhere=True)] * bool(capacity)
    messages += [sent(rows, nbytes, True)] * (any(t.priced for t in call.operands) + hidden.priced)
    messages += [sent(scales, wide, True)] * weight.priced
    kept = gating_of(call.args[5]).parts * ITEMSIZE[gate_up.dtype]  # of every slot, of which a share is counted already
    besides = (inner, held * kept), (real("tkf", (tokens, slots, inside)) or (), -1.0 * kept)
    saved = (rows, held * nbytes), *besides
    # what arrives, what comes of it, and what comes back
    products = (rows, (2 * held + 1) * nbytes), (scales, held * wide), *besides
    busiest = min(capacity, IMBALANCE) if capacity else IMBALANCE
    # gradients of what comes back and of what arrived, on either side of their way
    working = ((rows, 4 * held * nbytes),)
    kernel = Kernel(
        tuple(messages), imbalance=busiest, saved=saved, products=products, working=working, capacity=capacity
    )
    return (Factor(DISPATCH, min(tokens, count), (At(0),) * len(call.operands), (At(0),), kernel=kernel, joint="t"),)
