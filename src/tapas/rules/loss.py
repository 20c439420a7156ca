"""Losses. A mean over split tokens needs their number too, classes that are split a few small all-reduces."""

from dataclasses import replace
from itertools import zip_longest

from tapas.ir.graph import ITEMSIZE
from tapas.rules.base import Call, Kernel, Rule, Wording, rule
from tapas.rules.notation import Term, broadcast, from_labels, placed, real, sums, wide

NONE, MEAN = 0, 1  # torch's numbers for reductions


def _whole(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """What shapes broadcast to."""
    columns = zip_longest(*(reversed(s) for s in shapes), fillvalue=1)
    return tuple(next((size for size in column if size != 1), 1) for column in columns)[::-1]


def _elementwise(call: Call, position: int) -> Rule:
    """A loss of every element, summed or averaged: each rank's share of the mean is its own affair."""
    reduction = call.arg(position, "reduction", MEAN)
    whole = _whole(*(t.shape for t in call.operands))
    terms = [broadcast(t.shape, whole) for t in call.operands]
    result = broadcast(whole, whole) if reduction == NONE else []
    mean = {f"d{i}": Kernel() for i in range(len(whole))} if reduction == MEAN else {}
    return from_labels(
        terms, [result], call, kernels=mean, kernel="loss.mean_loss" if mean else None, full_precision=True
    )


@rule("aten.mse_loss.default", "aten.l1_loss.default", "aten.smooth_l1_loss.default", "aten.huber_loss.default",
      "aten.kl_div.default", "aten.soft_margin_loss.default")  # fmt: skip
def regression(call: Call) -> Rule:
    return _elementwise(call, 2)


@rule("aten.binary_cross_entropy.default")
def binary_cross_entropy(call: Call) -> Rule:
    return _elementwise(call, 3)


@rule("aten.binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(call: Call) -> Rule:
    return _elementwise(call, 4)


def _terms(call: Call) -> tuple[Term, Term]:
    """Labels of the tokens, and of the logits: d0 c d1 d2 ..."""
    tokens: Term = [[f"d{i}"] for i in range(call.rank - 1)]
    return tokens, [*tokens[:1], ["c"], *tokens[1:]]


def _token_factors(call: Call, tokens: Term) -> tuple[str, ...] | None:
    shape = call.operands[0].shape
    return real((t[0] for t in tokens), (*shape[:1], *shape[2:]) if len(shape) > 1 else ())


def _classified(call: Call, classes: Kernel, soft: bool, kernel: str) -> Rule:
    tokens, logits = _terms(call)
    operands = placed(call, (0, "self", logits), (1, "target", logits if soft else tokens), (2, "weight", [["c"]]))
    reduction = call.arg(3, "reduction", MEAN)
    # the sum and the number of the tokens that are not ignored, in one message: left as a partial sum, the loss
    # would be waited for a second time
    mean = Kernel(sums((), 2 * wide(call.operands[0])), results=("R",))
    kernels = {t[0]: mean for t in tokens} if reduction == MEAN else {}
    result = tokens if reduction == NONE else []
    options = {"kernel": kernel, "full_precision": True, "family": "cross_entropy", "backward": 1.0}
    return from_labels(operands, [result], call, kernels=kernels | {"c": classes}, **options)


CLASSES = {"c": "vocabulary"}


@rule("aten.cross_entropy_loss.default", wording=Wording("cross-entropy", CLASSES, listed=True))
def cross_entropy(call: Call) -> Rule:
    """Split classes: the largest logit, then everything else about a token in one all-reduce."""
    x, target = call.operands[0], call.operands[1]
    soft = target.dtype.startswith(("float", "bfloat"))
    weighted, smoothed = call.tensor(call.arg(2, "weight")) is not None, bool(call.arg(5, "label_smoothing", 0.0))
    numbers = 3 if soft else 2 + weighted + smoothed + (weighted and smoothed)
    tokens = _token_factors(call, _terms(call)[0])
    sent = (*sums(tokens, wide(x)), *sums(tokens, wide(x) * numbers))
    # torch's backward pass goes through log-probabilities, whose gradient is as large as that of the logits
    kernel = Kernel(sent, results=("R",), lean=True, slower=(1.9, 1.0) if wide(x) == ITEMSIZE[x.dtype] else (5.3, 1.75))
    return replace(_classified(call, kernel, soft, "loss.cross_entropy"), workspace=0)


@rule("aten.nll_loss2d.default")
@rule("aten.nll_loss.default", "aten.nll_loss_nd.default", wording=Wording(factors=CLASSES))
def nll_loss(call: Call) -> Rule:
    """Split classes: each rank has the targets it holds. Only they know the weight of their class."""
    asks = call.tensor(call.arg(2, "weight")) is not None and call.arg(3, "reduction", MEAN) == MEAN
    return _classified(call, Kernel(sums((), wide(call.operands[0])) if asks else ()), False, "loss.nll_loss")
